"""Tensors in what ``torch.save`` wrote, read without torch's loader and without running anything.

Three containers occur in Transformer Engine's states: a zip archive (torch since 1.6), the stream of pickles that
came before it and that tensors still use when pickled by themselves, and a bare pickle whose tensors hold such
streams.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

from te_hal.quantization.pickle_reader import Made, Name, Persistent, UnreadablePickleError, read_pickle

#: What zipfile raises for one.
_ARCHIVE_DAMAGE = (
    *(zipfile.BadZipFile, EOFError, LookupError, OSError, OverflowError, RuntimeError, ValueError),
    *(struct.error, zlib.error),
)

_MAGIC_NUMBER, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_COUNT = struct.Struct("<q")

#: Bytes an element, by the name of the storage class. Only the first is made a tensor of; the others are skipped.
_ELEMENT_BYTES = {
    "FloatStorage": 4,
    "DoubleStorage": 8,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
}
_REBUILD, _FROM_BYTES = Name("torch._utils", "_rebuild_tensor_v2"), Name("torch.storage", "_load_from_bytes")
_STORAGES = frozenset(Name("torch", name) for name in _ELEMENT_BYTES)

#: What a tensor refers to.
TENSOR_NAMES = _STORAGES | {_REBUILD, _FROM_BYTES, Name("collections", "OrderedDict")}


class SavedValue(NamedTuple):
    """An inert value, and the raw memory of its tensors by key; none where each tensor brings its own."""

    value: Any
    memory: dict[str, bytes]


def read_saved(data: bytes, names: frozenset[Name]) -> SavedValue:
    """Read any of the three containers.

    Args:
        data: the whole of it.
        names: that may be referred to, besides those of tensors.

    Raises:
        UnreadablePickleError: damaged, or with anything else in it.
    """
    names = names | TENSOR_NAMES
    if data[:2] == b"PK":
        return _read_archive(data, names)
    first, end = read_pickle(data, names)
    if first == _MAGIC_NUMBER:
        return _read_stream(data, end, names)
    if end != len(data):
        raise UnreadablePickleError(f"{len(data) - end} bytes after the end")
    return SavedValue(first, {})


def _read_archive(data: bytes, names: frozenset[Name]) -> SavedValue:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise UnreadablePickleError("an archive with compressed entries")
            if sum(entry.file_size for entry in entries) > len(data):
                raise UnreadablePickleError("an archive whose entries overlap")
            contents = {entry.filename.partition("/")[2]: archive.read(entry) for entry in entries}
    except _ARCHIVE_DAMAGE as error:
        raise UnreadablePickleError(f"a damaged archive ({error})") from error
    if "data.pkl" not in contents or contents.get("byteorder", b"little") != b"little":
        raise UnreadablePickleError("an archive that torch.save did not write on a little-endian machine")
    value, end = read_pickle(contents["data.pkl"], names)
    if end != len(contents["data.pkl"]):
        raise UnreadablePickleError("bytes after the end")
    memory = {name.removeprefix("data/"): raw for name, raw in contents.items() if name.startswith("data/")}
    return SavedValue(value, memory)


def _read_stream(data: bytes, start: int, names: frozenset[Name]) -> SavedValue:
    """Protocol, facts of the machine, the value, keys of the memory, and then the memory itself in that order."""
    parts = []
    for _ in range(4):
        part, start = read_pickle(data, names, start)
        parts.append(part)
    protocol, machine, value, keys = parts
    little = isinstance(machine, dict) and machine.get("little_endian") is True
    if protocol != _PROTOCOL or not little or not isinstance(keys, list):
        raise UnreadablePickleError("a stream that torch.save did not write on a little-endian machine")
    if len(keys) > 1 or not isinstance(value, Persistent):
        raise UnreadablePickleError("several tensors in one stream of pickles")
    memory = {}
    for key in keys:
        end = start + _COUNT.size + _storage_bytes(value)
        if len(data) < start + _COUNT.size or len(data) != end:
            raise UnreadablePickleError("memory that is cut short or too long")
        memory[key] = data[start + _COUNT.size : end]
    return SavedValue(value, memory)


def _storage_bytes(storage: Persistent) -> int:
    kind, _, _, count = _storage_facts(storage)
    return count * _ELEMENT_BYTES[kind.attribute]


def _storage_facts(storage: object) -> tuple[Name, str, object, int]:
    """Class, key, place and number of elements of a tensor's memory."""
    identity = storage.identity if isinstance(storage, Persistent) else ()
    if len(identity) not in (5, 6) or identity[0] != "storage" or any(part is not None for part in identity[5:]):
        raise UnreadablePickleError("a tensor without memory")
    _, kind, key, place, count = identity[:5]
    if kind not in _STORAGES or not isinstance(key, str) or not _is_size(count):
        raise UnreadablePickleError("a tensor over unknown memory")
    return kind, key, place, count


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tensor_of(value: object, memory: dict[str, bytes]) -> torch.Tensor:
    """A contiguous fp32 tensor on the CPU, of what would have been rebuilt.

    Args:
        value: inert.
        memory: of the container that it comes from.

    Raises:
        UnreadablePickleError: no such tensor, or sizes that its memory does not have.
    """
    if not isinstance(value, Made) or value.of != _REBUILD or len(value.arguments) not in (6, 7):
        raise UnreadablePickleError("something that is no tensor")
    storage, offset, shape, stride = value.arguments[:4]
    if isinstance(storage, Made) and storage.of == _FROM_BYTES:
        if len(storage.arguments) != 1 or not isinstance(storage.arguments[0], bytes):
            raise UnreadablePickleError("a tensor without memory")
        storage, memory = read_saved(storage.arguments[0], frozenset())
    kind, key, _, count = _storage_facts(storage)
    raw = memory.get(key, b"")
    if kind.attribute != "FloatStorage" or len(raw) != 4 * count:
        raise UnreadablePickleError(f"a tensor of {len(raw)} bytes over {count} elements of {kind}")
    if not _is_size(offset) or not isinstance(shape, tuple) or not all(map(_is_size, shape)):
        raise UnreadablePickleError("a tensor without sizes")
    elements = math.prod(shape)
    if stride != _contiguous(shape) or offset + elements > count:
        raise UnreadablePickleError(f"a tensor of shape {shape} and stride {stride} over {count} elements")
    made = torch.empty(shape, dtype=torch.float32, device="cpu")
    if elements:
        chosen = bytearray(raw[4 * offset : 4 * (offset + elements)])
        made.copy_(torch.frombuffer(chosen, dtype=torch.float32).view(shape))
    return made


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
