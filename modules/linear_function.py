"""The autograd Function of a linear layer: three gemms over plain or quantized operands, run by a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules import linear_steps
from te_hal.modules.once import once
from te_hal.modules.rows import as_result
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from te_hal.modules.linear_call import LinearCall
    from te_hal.schema.storage import QuantizedStorage


class LinearFunction(torch.autograd.Function):
    """``y = x @ weight.T + bias``, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantized_weight: QuantizedStorage | None,
        call: LinearCall,
    ) -> torch.Tensor:
        """Run fprop.

        Args:
            ctx: autograd's context.
            input: ``[..., in_features]``, plain; under FP8 also a Float8Tensor.
            weight: ``[out_features, in_features]`` in the activation dtype.
            bias: ``[out_features]`` or None.
            quantized_weight: the weight that the gemms read under FP8, with the copies that the plan makes.
            call: the rest.

        Returns:
            ``[..., out_features]`` in the activation dtype; a Float8Tensor where the call asks for it.
        """
        plan = call.plan
        weight_operand = weight if quantized_weight is None else quantized_weight
        input_operand = linear_steps.input_operand(input, call)
        output = linear_steps.fprop(input_operand, weight_operand, bias, plan)
        kept = linear_steps.kept_input(input_operand, plan, input)
        tensors, ctx.rebuilds = prepare_for_saving(kept, linear_steps.kept_weight(weight_operand, plan, weight))
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape = call, input.shape
        return linear_steps.quantized_output(as_result(output, (*input.shape[:-1], output.shape[-1])), call)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.call.module)
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run dgrad, wgrad and the bias gradient, as far as they are asked for.

        In place: wgrad writes to ``main_grad`` where the layer fuses its accumulation; under delayed scaling amax is
        recorded, and the region's first call updates the backward scaling states at the end.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., out_features]`` in the output's dtype, or a Float8Tensor.

        Returns:
            Gradients in the activation dtype, None where not asked for: input ``[..., in_features]`` (a Float8Tensor
            with ``fp8_grad``), weight ``[out_features, in_features]`` (None where main_grad has it), bias
            ``[out_features]``; None for the rest.

        Raises:
            StateError: ``main_grad`` is gone or does not fit any more.
        """
        call: LinearCall = ctx.call
        plan, key = call.plan, call.plan.key
        saved_input, saved_weight = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        grad, grad_bias = linear_steps.grad_operand(grad_output, call)
        grad_input = grad_weight = None
        if grad is not None:
            product = linear_steps.dgrad(grad, saved_weight, plan)
            grad_input = None if product is None else product.view(ctx.input_shape)
            grad_weight = linear_steps.wgrad(grad, saved_input, call)
        if grad_input is not None and key.fp8_grad and call.quantizers is not None:
            grad_input = linear_steps.quantize_result(
                grad_input, call.quantizers.grad_input, plan.casts.grad_input, key.dtype
            )
        linear_steps.end_backward(call)
        return grad_input, grad_weight, grad_bias, None, None
