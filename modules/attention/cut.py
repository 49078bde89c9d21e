"""Parts of one projection's output: views going forward, one gradient written part by part going back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.once import once
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes of a wide element.
_WIDE = torch.complex128.itemsize


class _CutFunction(torch.autograd.Function):
    """Keeps nothing but sizes."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, sizes: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Parts of ``sizes`` along ``dim``."""
        ctx.shape, ctx.dtype, ctx.device = mixed.shape, mixed.dtype, mixed.device
        ctx.sizes, ctx.dim = sizes, dim
        return torch.split(mixed, list(sizes), dim)

    @staticmethod
    @run_eagerly
    @once(lambda _: "MultiheadAttention")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The parts' gradients side by side."""
        whole = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        for part, grad in zip(torch.split(whole, ctx.sizes, ctx.dim), grads, strict=True):
            wide, narrow = _wide(part), _wide(grad)
            if wide is None or narrow is None:
                part.copy_(grad)
            else:
                wide.copy_(narrow)
        return whole, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same memory in elements of 16 bytes; None where its rows do not consist of such.

    Torch copies what is not dense one element a thread. Of bf16 that took 88 us on an H200 for a part of 8192 x 4096,
    at a third of the memory's rate.
    """
    size = tensor.element_size()
    outer = (tensor.shape[-1] * size, tensor.data_ptr(), *(stride * size for stride in tensor.stride()[:-1]))
    if tensor.stride(-1) != 1 or any(number % _WIDE for number in outer):
        return None
    return tensor.view(torch.complex128)


def cut(mixed: torch.Tensor, sizes: Sequence[int], dim: int) -> tuple[torch.Tensor, ...]:
    """``torch.split`` whose backward writes the gradient of ``mixed`` in wide elements.

    Args:
        mixed: any shape.
        sizes: of the parts along ``dim``; they add up to its size.
        dim: which dimension.

    Returns:
        Views, one per size.
    """
    if not (torch.is_grad_enabled() and mixed.requires_grad):
        return torch.split(mixed, list(sizes), dim)
    parts: tuple[torch.Tensor, ...] = _CutFunction.apply(mixed, sizes, dim)  # type: ignore[no-untyped-call]
    return parts
