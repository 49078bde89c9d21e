"""The leaf that every layer may import: op schemas as data, formats, storages, capability answers, errors."""
