"""The autograd Function of LayerNormLinear: a norm, and a product that reads its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules import linear_steps
from te_hal.modules.norm_stage import calibrate, normalise, through_norm
from te_hal.modules.once import once
from te_hal.modules.rows import as_result, plain_rows
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.norm_stage import NormStage
    from te_hal.quantization import Quantizer
    from te_hal.schema.storage import QuantizedStorage


class LayerNormLinearCall(NamedTuple):
    """What forward and backward of one call share.

    Attributes:
        norm: the norm.
        linear: the product.
        returns_norm: the norm's result is returned as well.
        calibrates: records the amax of the norm's result; None unless calibrating.
    """

    norm: NormStage
    linear: LinearCall
    returns_norm: bool
    calibrates: Quantizer | None


class LayerNormLinearFunction(torch.autograd.Function):
    """``y = norm(x) @ weight.T + bias``, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantized_weight: QuantizedStorage | None,
        call: LayerNormLinearCall,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run the norm and fprop.

        Args:
            ctx: autograd's context.
            input: ``[..., in_features]``, plain, in the activation dtype.
            gamma: ``[in_features]``.
            beta: the same; None means RMSNorm.
            weight: ``[out_features, in_features]``.
            bias: ``[out_features]`` or None.
            quantized_weight: the weight that the gemms read under FP8, with the copies that the plan makes.
            call: the rest.

        Returns:
            ``[..., out_features]`` in the activation dtype, a Float8Tensor where the call asks for it; with
            ``returns_norm`` also the norm's result, ``[..., in_features]``.
        """
        plan = call.linear.plan
        rows = plain_rows(input)
        normed = normalise(rows, gamma, beta, call.norm, call.linear)
        calibrate(call.calibrates, normed.output)
        weight_operand = weight if quantized_weight is None else quantized_weight
        output = linear_steps.fprop(normed.operand, weight_operand, bias, plan)
        kept = linear_steps.kept_input(normed.operand, plan, normed.output)
        returned = None
        if call.returns_norm and normed.output is not None:
            returned = as_result(normed.output, input.shape)
            kept = returned if kept is normed.output else kept  # so that a later write to it is noticed
        of_norm = (rows, gamma, *normed.statistics) if plan.key.dgrad else ()
        kept_weight = linear_steps.kept_weight(weight_operand, plan, weight)
        tensors, ctx.rebuilds = prepare_for_saving(kept, kept_weight, *of_norm)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape = call, input.shape
        result = linear_steps.quantized_output(as_result(output, (*input.shape[:-1], output.shape[-1])), call.linear)
        return result if returned is None else (result, returned)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.call.linear.module)
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_output: torch.Tensor,
        grad_normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run dgrad, wgrad, the bias gradient and the norm's backward, as far as they are asked for.

        In place: as LinearFunction.backward.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., out_features]`` in the output's dtype, or a Float8Tensor.
            grad_normed: of the norm's result where that was returned.

        Returns:
            Gradients in the activation dtype, None where not asked for: input ``[..., in_features]``, gamma, beta,
            weight (None where main_grad has it), bias; None for the rest.

        Raises:
            StateError: ``main_grad`` is gone or does not fit any more.
        """
        call: LayerNormLinearCall = ctx.call
        kept, weight, *of_norm = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        grad, grad_bias = linear_steps.grad_operand(grad_output, call.linear)
        of_input: tuple[torch.Tensor | None, ...] = (None, None, None)
        grad_weight = None
        if grad is not None:
            product = linear_steps.dgrad(grad, weight, call.linear.plan)
            grad_weight = linear_steps.wgrad(grad, kept, call.linear)
            if product is not None:
                of_input = through_norm(product, grad_normed, of_norm, call.norm.norm, ctx.input_shape)
        linear_steps.end_backward(call.linear)
        return *of_input, grad_weight, grad_bias, None, None
