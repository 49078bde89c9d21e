"""Activations of any rank as the matrices that gemms take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.copies import with_copies
from te_hal.quantization.float8_tensor import Float8Tensor

if TYPE_CHECKING:
    import torch

    from te_hal.quantization.linear_calls import Copies
    from te_hal.schema.formats import ColumnwiseOrder
    from te_hal.schema.storage import QuantizedStorage


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
    return storage.view((-1, storage.shape[-1]))
