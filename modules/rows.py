"""Activations of any rank as the matrices that gemms take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.copies import with_copies
from te_hal.quantization.float8_tensor import Float8Tensor
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch

    from te_hal.modules.plan import Copies


def plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[M, K]``, dequantized if need be; a view where strides allow."""
    plain = tensor.dequantize() if isinstance(tensor, Float8Tensor) else tensor
    return plain.reshape(-1, plain.shape[-1])


def quantized_rows(tensor: Float8Tensor, copies: Copies, order: ColumnwiseOrder) -> QuantizedStorage:
    """The quantized data of ``[..., K]`` as ``[M, K]``, with just the copies asked for, made where they are missing.

    Nothing is rounded again. Copies that are there are shared.
    """
    storage = with_copies(
        tensor.quantized_storage, rowwise=copies.rowwise, columnwise=copies.columnwise, order=order
    ).keep(rowwise=copies.rowwise, columnwise=copies.columnwise)
    columns = storage.shape[-1]
    row, column = storage.rowwise_data, storage.columnwise_data
    if row is not None:
        row = row.view(-1, columns)
    if column is not None:
        column = column.view(columns, -1) if order == ColumnwiseOrder.TRANSPOSED else column.view(-1, columns)
    return QuantizedStorage(
        format=storage.format,
        mode=storage.mode,
        shape=(storage.numel() // columns, columns),
        dtype=storage.dtype,
        rowwise_data=row,
        rowwise_scale_inv=storage.rowwise_scale_inv,
        columnwise_data=column,
        columnwise_scale_inv=storage.columnwise_scale_inv,
        columnwise_order=order,
    )
