"""The file that holds one call: its inputs, the result that was found, and where that was.

torch.save of plain containers, numbers, text and CPU tensors, so that torch.load(weights_only=True) reads it and
nothing in it is run. A file is written whole under a name that was free, or not at all.
"""

from __future__ import annotations

import os
import pickle
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal._version import __version__
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import CheckpointError
from te_hal.schema.formats import FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_KIND, _VERSION = "te_hal.shadow call", 2
_SUFFIX = ".tehalcall"


@dataclass(frozen=True)
class SavedCall:
    """What a file holds.

    Attributes:
        op: name of the op.
        backend, reference: names.
        device: type of the device that the operands were on.
        arguments: every argument by name, on the CPU, as before the call.
        found: the backend's results and written operands by name, on the CPU.
        about: call, case, layer, direction, step, findings and versions, as text and numbers.
    """

    op: str
    backend: str
    reference: str
    device: str
    arguments: dict[str, Any]
    found: dict[str, Any]
    about: dict[str, Any]


def versions() -> dict[str, str]:
    """What a result may depend on beside its inputs."""
    return {"te_hal": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def write_call(folder: Path, call: SavedCall) -> Path:
    """Write a call into a new file of a folder, which is made if it is missing.

    Returns:
        The file; its name has the step, the op and a number that was free.

    Raises:
        OSError: nothing is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "op": call.op,
        "backend": call.backend,
        "reference": call.reference,
        "device": call.device,
        "arguments": _plain(call.arguments),
        "found": _plain(call.found),
        "about": call.about,
    }
    stem = f"step{call.about.get('step', 0)}-{call.op}"
    part = folder / f".{stem}.{os.getpid()}.part"
    try:
        torch.save(content, part)
        return _take_free_name(part, folder, stem)
    finally:
        part.unlink(missing_ok=True)


def _take_free_name(part: Path, folder: Path, stem: str) -> Path:
    """A hard link refuses a name that is taken, also by another process just now."""
    number = 0
    while True:
        number += 1
        path = folder / f"{stem}-{number}{_SUFFIX}"
        try:
            path.hardlink_to(part)
        except FileExistsError:
            continue
        return path


def read_call(path: Path) -> SavedCall:
    """The call in a file. Nothing in it is run.

    Raises:
        CheckpointError: cannot be read, is no such file, of another version, or names an op that does not exist.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _refused(path, f"a file that cannot be read ({error.strerror})") from None
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise _refused(path, "a file of another kind, cut short or altered") from None
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise _refused(path, "a file of another kind")
    if content["version"] != _VERSION or content["op"] not in SCHEMAS:
        raise _refused(path, f"version {content['version']} with a call of {content['op']!r}")
    op = content["op"]
    choices = {flag.name: flag.choices for flag in SCHEMAS[op].flags}
    arguments = {name: _choice(_real(value), choices.get(name, ())) for name, value in content["arguments"].items()}
    found = {name: _real(value) for name, value in content["found"].items()}
    return SavedCall(
        op, content["backend"], content["reference"], content["device"], arguments, found, content["about"]
    )


def _refused(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        str(path), got=got, accepted=f"a call as te_hal.shadow saves it, version {_VERSION}", todo="name another file"
    )


def _plain(value: Any) -> Any:  # noqa: ANN401 - any argument of an op
    """A value as containers, tensors, numbers and text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, QuantizedStorage):
        return {
            "storage": value.format.name,
            "mode": value.mode.value,
            "shape": list(value.shape),
            "nominal": str(value.dtype).removeprefix("torch."),
            "order": value.columnwise_order.value,
            "tensors": list(value.tensors()),
        }
    return getattr(value, "value", value)


def _real(value: Any) -> Any:  # noqa: ANN401
    """The value that :func:`_plain` was given; a member of an enum comes back as its text."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_real, value))
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    row, row_scale_inv, column, column_scale_inv = value["tensors"]
    return QuantizedStorage(
        format=FORMATS[value["storage"]],
        mode=ScalingMode(value["mode"]),
        shape=tuple(value["shape"]),
        dtype=getattr(torch, value["nominal"]),
        rowwise_data=row,
        rowwise_scale_inv=row_scale_inv,
        columnwise_data=column,
        columnwise_scale_inv=column_scale_inv,
        columnwise_order=ColumnwiseOrder(value["order"]),
    )


def _choice(value: Any, choices: tuple[object, ...]) -> Any:  # noqa: ANN401
    """The member of an enum among the choices that a text stands for."""
    return next((choice for choice in choices if isinstance(value, str) and choice == value), value)


def call_text(op: str, arguments: Mapping[str, Any]) -> str:
    """The call by operands with dtypes and shapes, and by its other arguments; without values of tensors."""
    words = [f"{name}={_word(value)}" for name, value in arguments.items() if value is not None]
    return f"{op}({', '.join(words)})"


def _word(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, (torch.Tensor, QuantizedStorage)):
        kind = repr(value.kind) if isinstance(value, QuantizedStorage) else str(value.dtype).removeprefix("torch.")
        return f"{kind}[{'x'.join(map(str, value.shape)) or 'scalar'}]"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return f"{len(value)} tensors"
    return str(getattr(value, "value", value)).removeprefix("torch.")
