"""Activations of any rank as the matrices that gemms take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.quantization.copies import with_copies
from te_hal.quantization.quantized_tensor import dequantized

if TYPE_CHECKING:
    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.quantized_tensor import QuantizedTensor
    from te_hal.schema.formats import ColumnwiseOrder
    from te_hal.schema.storage import QuantizedStorage


def plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[M, K]``, dequantized if need be; a view where strides allow."""
    plain = dequantized(tensor)
    return plain if plain.dim() == 2 else plain.reshape(-1, plain.shape[-1])  # noqa: PLR2004 - rows already


def as_result(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What a Function returns, in ``shape``: the same memory, and not a view to autograd.

    Autograd refuses in-place operations on a view that was made inside a Function, and so would
    ``nn.ReLU(inplace=True)`` after a layer. A kernel's result belongs to nobody else, so it need not be one.
    """
    if tensor.shape == shape and tensor._base is None:  # noqa: SLF001 - no view; torch has no other question
        return tensor
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, shape)  # noqa: SLF001 - the operator's name
    return result


def quantized_rows(tensor: QuantizedTensor, copies: Copies, order: ColumnwiseOrder) -> QuantizedStorage:
    """The quantized data of ``[..., K]`` as ``[M, K]``, with just the copies asked for, made where they are missing.

    Nothing is rounded again. Copies that are there are shared.
    """
    storage = with_copies(
        tensor.quantized_storage, rowwise=copies.rowwise, columnwise=copies.columnwise, order=order
    ).keep(rowwise=copies.rowwise, columnwise=copies.columnwise)
    return storage.view((-1, storage.shape[-1]))
