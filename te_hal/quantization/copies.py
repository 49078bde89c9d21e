"""Missing copies of per-tensor quantized data, made from the one that is there without rounding again."""

from __future__ import annotations

from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage, StorageKind


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
    codes, scale_inv, transposed = storage.copy_to_read()
    row = codes.movedim(0, -1).contiguous() if transposed else codes
    column = storage.columnwise_data if has_column else None
    if columnwise and column is None:
        column = row if order == ColumnwiseOrder.SAME else row.movedim(-1, 0).contiguous()
    kind = StorageKind.of(storage.format, storage.mode, rowwise=True, columnwise=column is not None, order=order)
    buffers = (row, scale_inv, column, None if column is None else scale_inv)
    return QuantizedStorage.of_kind(kind, storage.shape, storage.dtype, storage.device, buffers)
