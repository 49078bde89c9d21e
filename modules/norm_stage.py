"""The norm before a product: in one pass with the cast under FP8, by itself elsewhere; and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from te_hal.dispatch import resolve
from te_hal.modules import linear_steps
from te_hal.modules.norm_function import NormPlan, make_norm_plan
from te_hal.modules.rows import plain_rows
from te_hal.quantization.linear_calls import fused_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.norm_function import NormKey
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization import Quantizer
    from te_hal.schema.support import Kind


class NormStage(NamedTuple):
    """Bound kernels of a norm and of the cast of its result.

    Attributes:
        norm: the norm, and its backward.
        quantize: norm and cast in one; None where they run one after the other, or nothing is cast.
    """

    norm: NormPlan
    quantize: Callable[..., Any] | None


class Normed(NamedTuple):
    """What the forward gives.

    Attributes:
        operand: what fprop reads.
        output: the result in the activation dtype; None where no such tensor exists.
        statistics: what the backward reads.
    """

    operand: Operand
    output: torch.Tensor | None
    statistics: tuple[torch.Tensor, ...]


def make_norm_stage(key: NormKey, plan: LinearPlan) -> NormStage:
    """Bind the kernels.

    Args:
        key: the norm.
        plan: the product that reads the result; its key says whether the norm quantizes it.
    """
    norm, of = make_norm_plan(key), plan.key.format_of("input")
    if of is None or not plan.key.input_is_quantized:
        return NormStage(norm, None)
    kinds: dict[str, Kind] = {"input": key.dtype, "weight": key.dtype}
    if key.op == "layernorm":
        kinds["bias"] = key.dtype
    call = fused_call(
        f"{key.op}_quantize",
        key.device,
        kinds,
        of.kind(plan.copies.input_made, plan.order),
        delayed=of.delayed,
        zero_centered_gamma=key.zero_centered_gamma,
    )
    return NormStage(norm, resolve(call).kernel)


def normalise(
    rows: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, stage: NormStage, call: LinearCall
) -> Normed:
    """Normalise ``[M, H]`` for the product of ``call`` (docs/numerics.md, F1)."""
    key, affine = stage.norm.key, (gamma,) if beta is None else (gamma, beta)
    settings: dict[str, Any] = {"epsilon": key.epsilon, "zero_centered_gamma": key.zero_centered_gamma}
    made = call.plan.copies.input_made
    if stage.quantize is not None and call.quantizers is not None:
        quantizer = call.quantizers.input
        storage, *statistics = linear_steps.cast_by(quantizer, made, stage.quantize, rows, *affine, **settings)
        return Normed(storage, None, tuple(statistics))
    output, *statistics = stage.norm.forward(rows, *affine, **settings)
    return Normed(linear_steps.input_operand(output, call), output, tuple(statistics))


def through_norm(
    grad: torch.Tensor,
    grad_normed: torch.Tensor | None,
    saved: Sequence[Any],
    plan: NormPlan,
    input_shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of input, gamma and beta (None for RMSNorm).

    Args:
        grad: of the norm's result, from the product that read it, ``[M, H]``.
        grad_normed: of the norm's result where that was returned, ``[..., H]``; is added.
        saved: input ``[M, H]``, gamma and the statistics of the forward.
        plan: the norm.
        input_shape: of the module's input.
    """
    rows, gamma, *statistics = saved
    if grad_normed is not None:
        grad = grad + plain_rows(grad_normed)
    grads = plan.backward(grad, rows, *statistics, gamma, zero_centered_gamma=plan.key.zero_centered_gamma)
    return grads[0].view(input_shape), grads[1], grads[2] if plan.key.op == "layernorm" else None


def calibrate(quantizer: Quantizer | None, tensor: torch.Tensor | None) -> None:
    """Record the amax of what a product reads, while calibrating."""
    if quantizer is not None and tensor is not None:
        quantizer.calibrate(tensor)
