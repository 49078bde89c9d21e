"""What a transformer layer does with a part's result: adds its bias, drops out, adds it to what the part read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import te_hal.ops
from te_hal.modules.once import once
from te_hal.modules.rows import plain_rows
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class _AddFunction(torch.autograd.Function):
    """``residual + (result + bias)`` in fp32, rounded once. Keeps nothing for backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,  # noqa: ARG004 - autograd's signature
        result: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """Add; all three of one dtype, ``bias`` ``[H]``, the others ``[..., H]``."""
        if bias is None:
            return residual + result
        rows = te_hal.ops.bias_residual(plain_rows(result), bias, plain_rows(residual))
        return rows.view(residual.shape)

    @staticmethod
    @run_eagerly
    @once(lambda _: "TransformerLayer")
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The gradient for both sides, and its sum over rows for the bias (docs/numerics.md, G5)."""
        grad_bias = te_hal.ops.bias_grad(plain_rows(grad_output)) if ctx.needs_input_grad[1] else None
        return grad_output, grad_bias, grad_output


def add_to_residual(
    result: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    dropout: float,
    drop_path: float = 0.0,
) -> torch.Tensor:
    """``residual + drop_path(dropout(result + bias))``.

    Without either the sum is taken in fp32 and rounded once (docs/numerics.md, G6); with one, or with operands of
    several dtypes (torch.autocast), each step is torch's own.

    Args:
        result: ``[..., H]``.
        bias: ``[H]``; None or of no elements: there is none.
        residual: shape of ``result``.
        dropout: share that is dropped; 0 outside of training.
        drop_path: share of the indices of dimension 0 for which all is dropped, likewise; the rest is scaled up.
    """
    bias = None if bias is None or not bias.numel() else bias
    plain = not dropout and not drop_path
    if plain and result.dtype == residual.dtype and (bias is None or bias.dtype == result.dtype):
        output: torch.Tensor = _AddFunction.apply(result, bias, residual)  # type: ignore[no-untyped-call]
        return output
    given = result if bias is None else result + bias
    given = torch.nn.functional.dropout(given, dropout) if dropout else given
    return residual + (_without_some_paths(given, drop_path) if drop_path else given)


def _without_some_paths(given: torch.Tensor, share: float) -> torch.Tensor:
    """Zeros for some indices of dimension 0, drawn in fp32 from torch's default generator of the device."""
    shape = (given.shape[0],) + (1,) * (given.dim() - 1)
    stays = (torch.rand(shape, dtype=torch.float32, device=given.device) + (1.0 - share)).floor()
    return given / (1.0 - share) * stays.to(given.dtype)
