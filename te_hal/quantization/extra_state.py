"""The bytes of ``_extra_state``: a versioned, checksummed header and raw arrays; no pickle.

Layout, all integers little-endian::

    8 bytes   magic b"TE_HAL_X"
    u32       version (1)
    u32       CRC-32 of everything after this field
    u32       length of the JSON header in bytes
    JSON      {"recipe": class name, "fields": {...}, "arrays": [{"name", "shape"}, ...]}
    raw       the arrays in that order, fp32 little-endian, without padding

A recipe without state is saved as zero bytes. What Transformer Engine wrote is read too
(te_hal.quantization.te_extra_state), but never written.
"""

from __future__ import annotations

import enum
import io
import json
import math
import struct
import sys
import zlib
from typing import Any

import torch

from te_hal.quantization.pickle_reader import UnreadablePickleError
from te_hal.quantization.saved_state import SavedState
from te_hal.quantization.te_extra_state import read_te_state
from te_hal.schema.errors import CheckpointError

__all__ = ["SavedState", "empty", "pack", "unpack"]

_MAGIC = b"TE_HAL_X"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")


def empty() -> torch.Tensor:
    """The ``_extra_state`` of a module without state: a uint8 tensor of no elements."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def pack(state: SavedState) -> torch.Tensor:
    """A CPU uint8 tensor that :func:`unpack` reads back."""
    header = {
        "recipe": state.recipe,
        "fields": {name: _printable(value) for name, value in state.fields.items()},
        "arrays": [{"name": name, "shape": list(array.shape)} for name, array in state.arrays.items()],
    }
    text = json.dumps(header, sort_keys=True).encode()
    raw = b"".join(_raw(array) for array in state.arrays.values())
    body = _LENGTH.pack(len(text)) + text + raw
    return torch.frombuffer(bytearray(_PREFIX.pack(_MAGIC, _VERSION, zlib.crc32(body)) + body), dtype=torch.uint8)


def unpack(saved: object, where: str) -> SavedState | None:
    """Read an ``_extra_state``; None for one of zero bytes.

    Args:
        saved: what the checkpoint holds.
        where: the module's name, for messages.

    Raises:
        CheckpointError: cut short, altered, of another version or type, or a pickle that Transformer Engine did not
            write. A pickle is not run.
    """
    if isinstance(saved, (io.BytesIO, dict, list)):
        return _foreign(saved, where)
    if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
        got = f"a {type(saved).__name__}" if not isinstance(saved, torch.Tensor) else f"a tensor of {saved.dtype}"
        raise _error(where, got, "save the model with te_hal, or load with this entry removed")
    data = saved.detach().cpu().contiguous().numpy().tobytes()
    if not data:
        return None
    if data[:1] == b"\x80":
        return _foreign(saved, where)
    if len(data) < _PREFIX.size + _LENGTH.size or data[:8] != _MAGIC:
        raise _error(where, f"{len(data)} bytes without te_hal's header", "restore the file from a copy")
    _, version, checksum = _PREFIX.unpack_from(data)
    if version != _VERSION:
        raise _error(where, f"version {version}", f"this te_hal reads version {_VERSION}; install a newer one")
    body = data[_PREFIX.size :]
    if zlib.crc32(body) != checksum:
        raise _error(where, "bytes that do not match their checksum (cut short or altered)", "restore from a copy")
    return _parse(body, where)


def _foreign(saved: object, where: str) -> SavedState | None:
    try:
        return read_te_state(saved)
    except UnreadablePickleError as error:
        got = f"state that is neither te_hal's nor Transformer Engine's ({error})"
        raise _error(where, got, "remove the entry: scaling state starts anew") from error


def _parse(body: bytes, where: str) -> SavedState:
    """Read what the checksum has vouched for: an error here means that something else wrote it."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        start = _LENGTH.size + length
        header = json.loads(body[_LENGTH.size : start].decode())
        recipe, fields = header["recipe"], header["fields"]
        if not isinstance(recipe, str) or not isinstance(fields, dict):
            raise TypeError("recipe is no text or fields is no mapping")  # noqa: TRY301 - one answer to all of them
        return SavedState(recipe, fields, _arrays(header["arrays"], body[start:]))
    except (LookupError, TypeError, ValueError, struct.error) as error:
        raise _error(where, f"a header that cannot be read ({error})", "restore the file from a copy") from error


def _arrays(entries: list[dict[str, Any]], raw: bytes) -> dict[str, torch.Tensor]:
    arrays = {}
    offset = 0
    for entry in entries:
        shape = tuple(int(size) for size in entry["shape"])
        end = offset + 4 * math.prod(shape)
        if min(shape, default=0) < 0 or end > len(raw):
            raise ValueError(f"array {entry['name']!r} of shape {shape} in {len(raw) - offset} bytes")
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        if values.numel():
            values.copy_(torch.frombuffer(bytearray(raw[offset:end]), dtype=torch.float32).view(shape))
        arrays[entry["name"]] = values
        offset = end
    if offset != len(raw):
        raise ValueError(f"{len(raw) - offset} bytes too many")
    return arrays


def _printable(value: Any) -> Any:  # noqa: ANN401 - a recipe's field
    if isinstance(value, enum.Enum):
        return value.name
    if callable(value):
        return f"callable {getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
    return value


def _raw(array: torch.Tensor) -> bytes:
    if sys.byteorder != "little":
        raise CheckpointError(
            "_extra_state", got="a big-endian machine", accepted="a little-endian one", todo="save on such a machine"
        )
    return array.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


def _error(where: str, got: str, todo: str) -> CheckpointError:
    accepted = "a uint8 tensor written by te_hal or Transformer Engine, or one of zero bytes"
    return CheckpointError(f"{where}: _extra_state", got=got, accepted=accepted, todo=todo)
