"""Quantizing for a user, with a gradient that ignores the rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.float8_tensor import Float8Tensor

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.schema.storage import QuantizedStorage


class _Quantize(torch.autograd.Function):
    """Wraps what ``tensor`` was quantized to; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, storage: QuantizedStorage, quantizer: Quantizer) -> Float8Tensor:  # noqa: ANN401
        ctx.dtype = tensor.dtype
        return Float8Tensor(storage, quantizer=quantizer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        plain = grad.dequantize() if isinstance(grad, Float8Tensor) else grad
        return plain.to(ctx.dtype), None, None


def quantize_straight_through(tensor: torch.Tensor, storage: QuantizedStorage, quantizer: Quantizer) -> Float8Tensor:
    """A Float8Tensor over the storage that ``tensor`` was quantized to, with a gradient that ignores the rounding.

    Args:
        tensor: where the gradient goes, in its own dtype.
        storage: shape of ``tensor``; shared, not copied.
        quantizer: the one of in-place operations on the result.
    """
    return _Quantize.apply(tensor, storage, quantizer)  # type: ignore[no-any-return,no-untyped-call]
