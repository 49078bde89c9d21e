"""Missing copies of per-tensor quantized data, made from the one that is there without rounding again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch


def with_copies(
    storage: QuantizedStorage, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> QuantizedStorage:
    """A storage that has the wanted copies: kept where present, else rearranged from the other copy.

    With one scale per tensor both copies hold the same codes, so rearranging is exact.

    Raises:
        UnsupportedError: another scaling mode, whose copies have scales of their own.
    """
    has_column = storage.columnwise_data is not None and storage.columnwise_order == order
    if (not rowwise or storage.rowwise_data is not None) and (not columnwise or has_column):
        return storage
    if storage.mode != ScalingMode.TENSOR:
        raise UnsupportedError(
            "QuantizedStorage",
            got=repr(storage.kind),
            accepted=f"rowwise={rowwise}, columnwise={columnwise}",
            todo="quantize again from the unquantized tensor",
        )
    row = storage.rowwise_data if storage.rowwise_data is not None else _to_rowwise(storage)
    scale_inv = storage.rowwise_scale_inv if storage.rowwise_scale_inv is not None else storage.columnwise_scale_inv
    column = storage.columnwise_data if has_column else None
    if columnwise and column is None:
        column = row if order == ColumnwiseOrder.SAME else _transpose(row)
    return QuantizedStorage(
        format=storage.format,
        mode=storage.mode,
        shape=storage.shape,
        dtype=storage.dtype,
        rowwise_data=row,
        rowwise_scale_inv=scale_inv,
        columnwise_data=column,
        columnwise_scale_inv=scale_inv if column is not None else None,
        columnwise_order=order,
    )


def _transpose(row: torch.Tensor) -> torch.Tensor:
    return row.movedim(-1, 0).contiguous()


def _to_rowwise(storage: QuantizedStorage) -> torch.Tensor:
    column = storage.columnwise_data
    if column is None or storage.columnwise_order == ColumnwiseOrder.SAME:
        return column  # type: ignore[return-value] # a storage has at least one copy
    return column.movedim(0, -1).contiguous()
