"""Storages for results of casts with one scale per tensor, made by the shortest way."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, code_format
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from te_hal.ffi.native import Native

_ONE = (1,)


@functools.cache
def kind_of(
    dtype: torch.dtype, mode: ScalingMode, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> StorageKind:
    """The kind that an op's flags name, as words or as members of their enums."""
    fmt, mode, order = code_format(dtype), ScalingMode(mode), ColumnwiseOrder(order)
    return StorageKind.of(fmt, mode, rowwise=rowwise, columnwise=columnwise, order=order)


def empty_storage(
    native: Native, kind: StorageKind, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> QuantizedStorage:
    """A storage without values, for per-tensor scaling; both copies share one ``scale_inv``.

    Args:
        native: makes the buffers.
        kind: format and copies.
        shape: logical shape.
        dtype: nominal dtype.
        device: of the result, which the calling thread is on.
    """
    empty = native.empty
    scale_inv = empty(_ONE, torch.float32, device)
    row = row_scale_inv = col = col_scale_inv = None
    if kind.rowwise:
        row, row_scale_inv = empty(shape, torch.uint8, device), scale_inv
    if kind.columnwise:
        turned = shape[-1:] + shape[:-1] if kind.order == ColumnwiseOrder.TRANSPOSED else shape
        col, col_scale_inv = empty(turned, torch.uint8, device), scale_inv
    return QuantizedStorage.of_kind(kind, shape, dtype, device, (row, row_scale_inv, col, col_scale_inv))
