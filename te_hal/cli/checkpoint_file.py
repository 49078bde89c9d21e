"""Reading a checkpoint file of any known kind without running what is in it."""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.cli.checkpoint import read_checkpoint
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.identity_tensor import rebuild_identity_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_ACCEPTED = "a file of torch.save (zip or older), safetensors, or te-hal compare"
_COMPARE_MAGIC = b"TEHALCMP"
_ZIP_MAGIC, _PICKLE_START = b"PK", b"\x80"

#: What torch's loader raises for a damaged file.
_DAMAGE = (
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, AssertionError),
    *(struct.error, zipfile.BadZipFile, ImportError, OverflowError),
)

#: Besides torch's own: what Transformer Engine 1.x and te_hal's quantized tensors are saved as. Neither runs anything.
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    io.BytesIO,
    rebuild_quantized_tensor,
    rebuild_hybrid_tensor,
    rebuild_identity_tensor,
]


class CheckpointFile(NamedTuple):
    """What a file holds.

    Attributes:
        kind: of the file, in words.
        nbytes: its size.
        content: plain containers, numbers, texts and tensors.
    """

    kind: str
    nbytes: int
    content: Any


def read_file(path: Path) -> CheckpointFile:
    """Read a checkpoint; tensors of a zip archive are mapped, not copied.

    Raises:
        CheckpointError: not there, not readable, of another kind, damaged, or with something in it that would have
            to be run.
    """
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        got = f"a file that cannot be read ({error.strerror})"
        raise CheckpointError(
            str(path), got=got, accepted=_ACCEPTED, todo="check the path and its permissions"
        ) from None
    if start[:8] == _COMPARE_MAGIC:
        found = read_checkpoint(path)
        return CheckpointFile("te-hal compare", nbytes, {"config": found.config, "state": found.state})
    if start[:2] == _ZIP_MAGIC or start[:1] == _PICKLE_START:
        return CheckpointFile("torch.save", nbytes, _torch_content(path, mapped=start[:2] == _ZIP_MAGIC))
    if start[8:9] == b"{":  # JSON, after eight bytes that say how long it is
        return CheckpointFile("safetensors", nbytes, _safetensors_content(path))
    raise CheckpointError(
        str(path),
        got="a file of another kind" if start else "an empty file",
        accepted=_ACCEPTED,
        todo="name a file that one of these wrote",
    )


def _torch_content(path: Path, *, mapped: bool) -> Any:  # noqa: ANN401 - what was saved
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        met = re.search(r"GLOBAL ([\w.]+)", str(error))
        if met is None:
            raise _damaged(path, "a pickle that is none of a checkpoint's") from None
        raise CheckpointError(
            str(path),
            got=f"something that would have to be run: {met[1]}",
            accepted=f"{_ACCEPTED}, of tensors and plain containers",
            todo="save a state_dict, not the model itself; or restore the file if it was altered",
        ) from None
    except _DAMAGE as error:
        raise _damaged(path, _first_line(error)) from None


def _safetensors_content(path: Path) -> Any:  # noqa: ANN401 - tensors by name
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - it need not be installed
    except ImportError:
        todo = "install safetensors to read its files"
        raise CheckpointError(str(path), got="a safetensors file", accepted=_ACCEPTED, todo=todo) from None
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, *_DAMAGE) as error:
        raise _damaged(path, _first_line(error)) from None


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        str(path),
        got=f"a file that is cut short or altered ({how})",
        accepted=_ACCEPTED,
        todo="restore the file from a copy",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
