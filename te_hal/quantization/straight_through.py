"""Quantizing for a user, with a gradient that ignores the rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.quantized_tensor import dequantized, wrap

if TYPE_CHECKING:
    from te_hal.quantization.quantized_tensor import QuantizedTensor
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.schema.storage import QuantizedStorage


class _Quantize(torch.autograd.Function):
    """Wraps what ``tensor`` was quantized to; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, storage: QuantizedStorage, quantizer: Quantizer) -> QuantizedTensor:  # noqa: ANN401
        ctx.dtype = tensor.dtype
        return wrap(storage, quantizer=quantizer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return dequantized(grad).to(ctx.dtype), None, None


def quantize_straight_through(tensor: torch.Tensor, storage: QuantizedStorage, quantizer: Quantizer) -> QuantizedTensor:
    """A QuantizedTensor over the storage that ``tensor`` was quantized to, with a gradient that ignores the rounding.

    Args:
        tensor: where the gradient goes, in its own dtype.
        storage: shape of ``tensor``; shared, not copied.
        quantizer: the one of in-place operations on the result.
    """
    return _Quantize.apply(tensor, storage, quantizer)  # type: ignore[no-any-return,no-untyped-call]
