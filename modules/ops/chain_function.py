"""The autograd Function of a chain: products one behind the other, each with what computes its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules import linear_steps
from te_hal.modules.activation_stage import activate, activation_backward
from te_hal.modules.norm_stage import NormStage, calibrate, normalise, through_norm
from te_hal.modules.once import once
from te_hal.modules.ops.extra_tensors import written_into
from te_hal.modules.rows import as_result, plain_rows
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.modules.activation_stage import ActivationStage
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.ops.link_plan import LinkPlan
    from te_hal.quantization import Quantizer

#: Of a link that autograd sees: gamma, beta, weight, bias.
_TENSORS = 4


class LinkCall(NamedTuple):
    """What forward and backward of one link share.

    Attributes:
        plan: what runs.
        linear: the product.
        calibrates: records the amax of what the product reads; None unless calibrating.
    """

    plan: LinkPlan
    linear: LinearCall
    calibrates: Quantizer | None


class _Gradient(NamedTuple):
    """Of a product's result on its way back: plain, or as the activation behind it gave it.

    Attributes:
        plain: ``[..., N]``; None where it comes quantized.
        operand: what dgrad and wgrad read; None where neither runs, or the product makes it.
        of_bias: its sum over rows, where it comes along.
        made: whether ``operand`` and ``of_bias`` came.
    """

    plain: torch.Tensor | None
    operand: Operand | None = None
    of_bias: torch.Tensor | None = None
    made: bool = False


class ChainFunction(torch.autograd.Function):
    """For each link in turn ``x = front(x) @ weight.T + bias``, and the gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        residual: torch.Tensor | None,
        quantized: Sequence[Any],
        calls: Sequence[LinkCall],
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the links.

        Args:
            ctx: autograd's context.
            input: ``[..., K]``; plain in the activation dtype, or a Float8Tensor.
            residual: ``[..., N]``, added to the last result, which is written into its memory; None: nothing is.
            quantized: by link, the weight that its gemms read under FP8; None without.
            calls: by link, the rest.
            tensors: gamma, beta, weight and bias of each link; None for what it lacks.

        Returns:
            ``[..., N]`` in the activation dtype.
        """
        kept: list[Any] = []
        counts, flowing = [], input
        for number, call in enumerate(calls):
            gamma, beta, weight, bias = tensors[_TENSORS * number : _TENSORS * (number + 1)]
            plan = call.plan.linear
            operand, plain, of_front = _front(flowing, gamma, beta, call)
            calibrate(call.calibrates, plain)
            read: Any = weight if quantized[number] is None else quantized[number]
            added = None if residual is not None and number + 1 == len(calls) else bias
            flowing = linear_steps.fprop(operand, read, added, plan)
            of_front = of_front if plan.key.dgrad else ()
            kept += linear_steps.kept_input(operand, plan, plain), linear_steps.kept_weight(read, plan, weight)
            kept += of_front
            counts.append(2 + len(of_front))
        saved, ctx.rebuilds = prepare_for_saving(*kept)
        ctx.save_for_backward(*saved)
        ctx.calls, ctx.counts, ctx.input_shape, ctx.adds = calls, counts, input.shape, residual is not None
        if residual is not None:
            _check_memory(residual, saved, calls[-1].linear.module)
            return written_into(residual, _sum(flowing, bias, residual, calls[-1].plan))
        return as_result(flowing, (*input.shape[:-1], flowing.shape[-1]))

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.calls[0].linear.module)
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run what gradients ask for, last link first.

        In place: as LinearFunction.backward.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., N]`` in the output's dtype, or a Float8Tensor.

        Returns:
            Gradients in the activation dtype, None where not asked for: input, residual, None twice, then gamma, beta,
            weight (None where main_grad has it) and bias of each link.

        Raises:
            StateError: a ``main_grad`` is gone or does not fit any more.
        """
        saved, calls = restore_from_saved(ctx.rebuilds, ctx.saved_tensors), ctx.calls
        grads: list[torch.Tensor | None] = []
        flowing, end = _Gradient(grad_output), len(saved)
        grad_residual = plain_rows(grad_output).view(grad_output.shape) if ctx.adds else None
        for number in reversed(range(len(calls))):
            start = end - ctx.counts[number]
            before = calls[number - 1].linear if number else None
            flowing, of_link = _through(flowing, saved[start:end], calls[number], before)
            grads, end = [*of_link, *grads], start
        product = flowing.plain
        grad_input = None if product is None else product.view(ctx.input_shape)
        return grad_input, grad_residual, None, None, *grads


def _front(
    given: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, call: LinkCall
) -> tuple[Operand, torch.Tensor | None, tuple[Any, ...]]:
    """What fprop reads; the same as a plain tensor, where there is one; what the backward of the front needs."""
    stage = call.plan.front
    if stage is None:
        return linear_steps.input_operand(given, call.linear), given, ()
    rows = plain_rows(given)
    if isinstance(stage, NormStage):
        normed = normalise(rows, gamma, beta, stage, call.linear)  # type: ignore[arg-type] # a norm has a gamma
        return normed.operand, normed.output, (rows, gamma, *normed.statistics)
    operand, plain = activate(rows.contiguous(), None, stage, call.linear)
    return operand, plain, (rows,)


def _check_memory(residual: torch.Tensor, saved: Sequence[torch.Tensor | None], module: str) -> None:
    """Refuse to write over what the backward of the same Function reads, which torch would not notice.

    Raises:
        ArgumentError: the extra input shares memory with a tensor that is kept.
    """
    address = residual.untyped_storage().data_ptr()
    if address and any(kept is not None and kept.untyped_storage().data_ptr() == address for kept in saved):
        raise ArgumentError(
            f"{module}: AddExtraInput(in_place=True) behind it",
            got="an extra input in the memory of a tensor that the backward reads",
            accepted="memory that nothing else reads",
            todo="use AddExtraInput(), or pass a copy",
        )


def _sum(result: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, plan: LinkPlan) -> torch.Tensor:
    """``residual + (result + bias)`` (docs/numerics.md, G6)."""
    if bias is None or plan.bias_residual is None:
        return residual + result.view(residual.shape)
    total: torch.Tensor = plan.bias_residual(result, bias, plain_rows(residual))
    return total.view(residual.shape)


def _through(
    grad: _Gradient, saved: Sequence[Any], call: LinkCall, before: LinearCall | None
) -> tuple[_Gradient, tuple[torch.Tensor | None, ...]]:
    """The gradient of what a link got, and those of gamma, beta, weight and bias.

    Args:
        grad: of its result.
        saved: input and weight of its product, then what its front needs.
        call: of the link.
        before: the product of the link before.
    """
    kept_input, kept_weight, *of_front = saved
    operand, of_bias = grad.operand, grad.of_bias
    if not grad.made and grad.plain is not None:
        operand, of_bias = linear_steps.grad_operand(grad.plain, call.linear)
    back, of_weight = _Gradient(None), None
    of_norm: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if operand is not None:
        product = linear_steps.dgrad(operand, kept_weight, call.linear.plan)
        of_weight = linear_steps.wgrad(operand, kept_input, call.linear)
        if product is not None:
            back, of_norm = _through_front(product, of_front, call.plan.front, before)
    linear_steps.end_backward(call.linear)
    return back, (*of_norm, of_weight, of_bias)


def _through_front(
    product: torch.Tensor,
    of_front: Sequence[Any],
    stage: NormStage | ActivationStage | None,
    before: LinearCall | None,
) -> tuple[_Gradient, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The gradient of what the front got, and those of gamma and beta."""
    if stage is None:
        return _Gradient(product), (None, None)
    rows = of_front[0]
    if isinstance(stage, NormStage):
        plain, of_gamma, of_beta = through_norm(product, None, of_front, stage.norm, rows.shape)
        return _Gradient(plain), (of_gamma, of_beta)
    if before is None:
        plain = stage.backward(product, rows, **stage.arguments, out_dtype=product.dtype)
        return _Gradient(plain), (None, None)
    if before.plan.key.dgrad or before.plan.key.wgrad:
        linear_steps.note_backward(before)
    operand, of_bias = activation_backward(product, rows, None, stage, before)
    return _Gradient(None, operand, of_bias, made=True), (None, None)
