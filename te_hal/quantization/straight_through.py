"""Quantizing for a user, with a gradient that ignores the rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.float8_tensor import Float8Tensor

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer


class _Quantize(torch.autograd.Function):
    """Quantize for a user; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Float8Tensor:  # noqa: ANN401
        ctx.dtype = tensor.dtype
        storage = quantizer._nominal(quantizer._with_usages(tensor.detach()), dtype)  # noqa: SLF001
        return Float8Tensor(storage, quantizer=quantizer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        plain = grad.dequantize() if isinstance(grad, Float8Tensor) else grad
        return plain.to(ctx.dtype), None, None


def quantize_straight_through(tensor: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Float8Tensor:
    """Quantize with a gradient that ignores the rounding."""
    return _Quantize.apply(tensor, quantizer, dtype)  # type: ignore[no-any-return,no-untyped-call]
