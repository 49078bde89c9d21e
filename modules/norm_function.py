"""The autograd Function of LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from te_hal.dispatch import current_memo, resolve
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import Float8Tensor
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.support import Kind


class NormKey(NamedTuple):
    """Everything a norm's plan depends on, the selection aside. ``op`` is "layernorm" or "rmsnorm"."""

    op: str
    dtype: torch.dtype
    device: torch.device
    zero_centered_gamma: bool


class NormPlan(NamedTuple):
    """Bound kernels of one norm; ``memo`` is dispatch's memo when they were bound."""

    memo: object
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def make_norm_plan(key: NormKey) -> NormPlan:
    """Ask for both kernels.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no.
    """
    memo = current_memo()
    dtype, statistics = key.dtype, torch.float32
    centered = {"zero_centered_gamma": key.zero_centered_gamma}
    forward: dict[str, Kind] = {"input": dtype, "weight": dtype}
    backward: dict[str, Kind] = {"grad_output": dtype, "input": dtype, "rstd": statistics, "weight": dtype}
    if key.op == "layernorm":
        forward["bias"] = dtype
        backward["mean"] = statistics
    return NormPlan(
        memo,
        resolve(Call(f"{key.op}_fwd", key.device, forward, {**centered, "out_dtype": None})).kernel,
        resolve(Call(f"{key.op}_bwd", key.device, backward, centered)).kernel,
    )


class NormFunction(torch.autograd.Function):
    """Normalise the last dimension; saves the input, the statistics and gamma."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: NormPlan,
        epsilon: float,
        zero_centered_gamma: bool,
    ) -> torch.Tensor:
        """Normalise ``input`` of shape ``[..., H]``; ``bias`` None means RMSNorm."""
        affine = (weight,) if bias is None else (weight, bias)
        output, *statistics = plan.forward(input, *affine, epsilon=epsilon, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(input, *statistics, weight)
        ctx.plan, ctx.zero_centered_gamma, ctx.has_bias = plan, zero_centered_gamma, bias is not None
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    @run_eagerly
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of input, weight and bias."""
        plain = grad_output.dequantize() if isinstance(grad_output, Float8Tensor) else grad_output
        grads = ctx.plan.backward(plain.contiguous(), *ctx.saved_tensors, zero_centered_gamma=ctx.zero_centered_gamma)
        grad_input, grad_weight, *rest = grads
        return grad_input, grad_weight, rest[0] if ctx.has_bias else None, None, None, None
