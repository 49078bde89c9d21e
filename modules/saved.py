"""Saving quantized storages for backward: as plain tensors, so that torch's saved-tensor hooks see them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from te_hal.schema.storage import StorageKind

    Saveable = torch.Tensor | QuantizedStorage | None
    Rebuild = Callable[[Sequence[torch.Tensor | None]], Saveable]

_BUFFERS = 4  #: of a storage


def prepare_for_saving(*values: Saveable) -> tuple[list[torch.Tensor | None], list[Rebuild]]:
    """Take values apart.

    Returns:
        Four tensors (or None) per storage and one per tensor, for ``ctx.save_for_backward``, and one function per
        value that puts it together again. The functions hold no tensor.
    """
    tensors: list[torch.Tensor | None] = []
    rebuilds: list[Rebuild] = []
    for value in values:
        if isinstance(value, QuantizedStorage):
            tensors += value.tensors()
            rebuilds.append(partial(_storage, value.kind, value.shape, value.dtype))
        else:
            tensors.append(value)
            rebuilds.append(_tensor)
    return tensors, rebuilds


def restore_from_saved(rebuilds: Sequence[Rebuild], tensors: Sequence[torch.Tensor | None]) -> list[Saveable]:
    """The values that :func:`prepare_for_saving` took apart."""
    values: list[Saveable] = []
    position = 0
    for rebuild in rebuilds:
        count = 1 if rebuild is _tensor else _BUFFERS
        values.append(rebuild(tensors[position : position + count]))
        position += count
    return values


def _tensor(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return tensors[0]


def _storage(
    kind: StorageKind, shape: tuple[int, ...], dtype: torch.dtype, tensors: Sequence[torch.Tensor | None]
) -> QuantizedStorage:
    buffers = tuple(tensors)
    device = next(tensor.device for tensor in buffers if tensor is not None)
    return QuantizedStorage.of_kind(kind, shape, dtype, device, buffers)
