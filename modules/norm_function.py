"""The autograd Function of LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import current_memo, resolve
from te_hal.modules.arguments import check_epsilon
from te_hal.modules.once import once
from te_hal.modules.rows import as_result
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.flags import check_flags
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.support import Kind


class NormKey(NamedTuple):
    """Everything a norm's plan depends on, the selection aside. ``op`` is "layernorm" or "rmsnorm"."""

    op: str
    dtype: torch.dtype
    device: torch.device
    epsilon: float
    zero_centered_gamma: bool


class NormPlan(NamedTuple):
    """Bound kernels of one norm; ``memo`` is dispatch's memo when they were bound."""

    key: NormKey
    memo: object
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def make_norm_plan(key: NormKey) -> NormPlan:
    """Ask for both kernels, and check what bound kernels are not asked about any more.

    Raises:
        ArgumentError: ``epsilon`` is negative or no number, ``zero_centered_gamma`` no bool; both can be assigned to.
        UnsupportedError: the backend, and every fallback that the policy lists, says no.
    """
    check_epsilon(f"{key.op}: eps", key.epsilon)
    check_flags(key.op, {"zero_centered_gamma": key.zero_centered_gamma})
    memo = current_memo()
    dtype, statistics = key.dtype, torch.float32
    centered = {"zero_centered_gamma": key.zero_centered_gamma}
    forward: dict[str, Kind] = {"input": dtype, "weight": dtype}
    backward: dict[str, Kind] = {"grad_output": dtype, "input": dtype, "rstd": statistics, "weight": dtype}
    if key.op == "layernorm":
        forward["bias"] = dtype
        backward["mean"] = statistics
    return NormPlan(
        key,
        memo,
        resolve(Call(f"{key.op}_fwd", key.device, forward, {**centered, "out_dtype": None})).kernel,
        resolve(Call(f"{key.op}_bwd", key.device, backward, centered)).kernel,
    )


_NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


class NormFunction(torch.autograd.Function):
    """Normalise the last dimension; saves the input, the statistics and gamma."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: NormPlan,
    ) -> torch.Tensor:
        """Normalise.

        Args:
            ctx: autograd's context.
            input: ``[..., H]``, plain.
            weight: gamma, ``[H]``, in the input's dtype.
            bias: beta, the same; None means RMSNorm.
            plan: the rest.

        Returns:
            ``[..., H]`` in the input's dtype.
        """
        key = plan.key
        affine = (weight,) if bias is None else (weight, bias)
        output, *statistics = plan.forward(
            input, *affine, epsilon=key.epsilon, zero_centered_gamma=key.zero_centered_gamma
        )
        ctx.save_for_backward(input, *statistics, weight)
        ctx.plan, ctx.has_bias = plan, bias is not None
        return as_result(output, output.shape)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: _NAMES[ctx.plan.key.op])
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of ``forward``'s arguments; nothing is changed in place.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., H]`` in the output's dtype; a quantized one is dequantized.

        Returns:
            Gradients of input ``[..., H]``, weight ``[H]`` and bias ``[H]`` (None for RMSNorm) in the input's dtype,
            and None for the plan.
        """
        plan: NormPlan = ctx.plan
        plain = dequantized(grad_output)
        grads = plan.backward(plain.contiguous(), *ctx.saved_tensors, zero_centered_gamma=plan.key.zero_centered_gamma)
        grad_input, grad_weight, *rest = grads
        return grad_input, grad_weight, rest[0] if ctx.has_bias else None, None
