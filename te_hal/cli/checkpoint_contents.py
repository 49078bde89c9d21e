"""What the content of a checkpoint consists of: tensors, extra states read, and the rest counted."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.quantization import HybridQuantizedTensor, IdentityTensor, QuantizedTensor, extra_state
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRA_STATE = "_extra_state"


class SavedTensor(NamedTuple):
    """One tensor.

    Attributes:
        name: where it stands.
        shape, dtype: its own; of a quantized one the logical shape and nominal dtype.
        nbytes: of its data, all copies and scales of a quantized one.
        note: for a quantized one, format, scaling mode and copies; else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    note: str


class SavedExtraState(NamedTuple):
    """One ``_extra_state``.

    Attributes:
        name: its key.
        nbytes: as saved.
        written_by: "te_hal", "Transformer Engine", or "" where it is empty.
        refused: why it cannot be read; empty where it can.
        state: what it holds; None where it is empty or refused.
    """

    name: str
    nbytes: int
    written_by: str
    refused: str
    state: extra_state.SavedState | None


class Contents(NamedTuple):
    """Everything in a checkpoint.

    Attributes:
        tensors: those that are no extra state.
        extra_states: in order.
        others: numbers and texts by where they stand.
    """

    tensors: list[SavedTensor]
    extra_states: list[SavedExtraState]
    others: dict[str, Any]


def list_contents(content: object) -> Contents:
    """Go through nested dicts, lists and tuples; nothing is run."""
    found = Contents([], [], {})
    for name, value in _leaves("", content):
        if name.rpartition(".")[2] == _EXTRA_STATE:
            found.extra_states.append(_read_extra_state(name, value))
        elif isinstance(value, torch.Tensor):
            found.tensors.append(_describe(name, value))
        else:
            found.others[name] = value
    return found


def _leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [(name, value)]
    while waiting:  # no recursion: nesting is as deep as the file says
        name, value = waiting.pop()
        if name.rpartition(".")[2] != _EXTRA_STATE and isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([(f"{name}.{key}" if name else str(key), item) for key, item in items])
        else:
            yield name, value


def _describe(name: str, tensor: torch.Tensor) -> SavedTensor:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, QuantizedTensor):
        return SavedTensor(name, shape, dtype, tensor.numel() * tensor.element_size(), "")
    storage = tensor.quantized_storage
    buffers = {id(t): t.nbytes for t in storage.tensors() if t is not None}
    copies = [which for which in ("rowwise", "columnwise") if getattr(storage.kind, which)]
    if isinstance(tensor, IdentityTensor):
        note = "in high precision, by an IdentityQuantizer"
    elif isinstance(tensor, HybridQuantizedTensor):
        note = f"two parts, {storage.kind!r}"
    else:
        note = f"{storage.format.name} codes, scale per {storage.mode.value}, {' and '.join(copies)}"
    return SavedTensor(name, shape, dtype, sum(buffers.values()), note)


def _read_extra_state(name: str, saved: object) -> SavedExtraState:
    nbytes, writer = _size_and_writer(saved)
    try:
        state = extra_state.unpack(saved, name)
    except CheckpointError as error:
        return SavedExtraState(name, nbytes, writer, error.got, None)
    return SavedExtraState(name, nbytes, writer, "", state)


def _size_and_writer(saved: object) -> tuple[int, str]:
    if isinstance(saved, io.BytesIO):
        return len(saved.getvalue()), "Transformer Engine"
    if not isinstance(saved, torch.Tensor):
        return 0, "Transformer Engine"
    if not saved.numel():
        return 0, ""
    starts_a_pickle = int(saved.reshape(-1)[0]) == 0x80  # noqa: PLR2004 - a pickle's first byte
    return saved.numel() * saved.element_size(), "Transformer Engine" if starts_a_pickle else "te_hal"


def as_json(contents: Contents) -> dict[str, Any]:
    """The same as plain JSON; numbers that JSON lacks become texts."""
    return {
        "tensors": [{**tensor._asdict(), "shape": list(tensor.shape)} for tensor in contents.tensors],
        "extra_states": [_extra_state_as_json(each) for each in contents.extra_states],
        "others": {name: _plain(value) for name, value in contents.others.items()},
    }


def _extra_state_as_json(each: SavedExtraState) -> dict[str, Any]:
    described: dict[str, Any] = {**each._asdict(), "state": None}
    if each.state is not None:
        described["state"] = {
            "recipe": each.state.recipe,
            "fields": {name: _plain(value) for name, value in each.state.fields.items()},
            "arrays": {name: _plain(array.tolist()) for name, array in each.state.arrays.items()},
        }
    return described


def _plain(value: Any) -> Any:  # noqa: ANN401 - a number, a text, or lists of them
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
