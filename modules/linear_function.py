"""The autograd Function of a linear layer: three gemms over plain or quantized operands, run by a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from te_hal.modules.main_grad import gradient_for_autograd, main_grad_of, should_accumulate
from te_hal.modules.rows import as_result, plain_rows, quantized_rows
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from te_hal.quantization.scaling_state import DelayedScalingState
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.quantizer import CastKernels, Quantizer

    Operand = torch.Tensor | QuantizedStorage


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
        plan, key = call.plan, call.plan.key
        weight_operand = weight if quantized_weight is None else quantized_weight
        input_operand = _input_operand(input, call)
        output: torch.Tensor = plan.fprop(
            input_operand,
            weight_operand,
            bias=None if bias is None else bias.to(key.bias_dtype),
            out_dtype=key.result_dtype("output"),
        )
        kept = plain_rows(input) if key.keeps_original_input else _keep(input_operand, plan.copies.input_kept)
        tensors, ctx.rebuilds = prepare_for_saving(
            kept if key.wgrad else None, _keep(weight_operand, plan.copies.weight_kept) if key.dgrad else None
        )
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape = call, input.shape
        output = as_result(output, (*input.shape[:-1], output.shape[-1]))
        if not key.fp8_output or call.quantizers is None:
            return output
        return _quantize_result(output, call.quantizers.output, plan.casts.output, key.dtype)

    @staticmethod
    @once_differentiable
    @run_eagerly
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
        grad, grad_bias = _grad_operand(grad_output, call)
        grad_input = grad_weight = None
        if grad is not None:
            if plan.dgrad is not None:
                out_dtype = key.result_dtype("grad_input")
                product: torch.Tensor = plan.dgrad(grad, saved_weight, layout="dgrad", out_dtype=out_dtype)
                grad_input = product.view(ctx.input_shape)
            grad_weight = _wgrad(grad, saved_input, call)
        if grad_input is not None and key.fp8_grad and call.quantizers is not None:
            grad_input = _quantize_result(grad_input, call.quantizers.grad_input, plan.casts.grad_input, key.dtype)
        if call.updates_backward and call.region is not None:
            call.region.queue.update(forward=False)
        return grad_input, grad_weight, grad_bias, None, None


def _input_operand(input: torch.Tensor, call: LinearCall) -> Operand:
    if isinstance(input, Float8Tensor):
        return quantized_rows(input, call.plan.copies.input_made, call.plan.order)
    rows = plain_rows(input)
    if call.quantizers is None:
        return rows
    return _quantize(rows, call.quantizers.input, call.plan.copies.input_made, call.plan.casts.input)


def _quantize(rows: torch.Tensor, quantizer: Quantizer, made: Copies, kernels: CastKernels) -> QuantizedStorage:
    return quantizer.quantize_storage(rows, rowwise=made.rowwise, columnwise=made.columnwise, kernels=kernels)


def _quantize_result(
    result: torch.Tensor, quantizer: Quantizer, kernels: CastKernels, dtype: torch.dtype
) -> Float8Tensor:
    storage = quantizer.quantize_storage(result, rowwise=True, columnwise=False, kernels=kernels)
    if isinstance(quantizer, Float8Quantizer):
        # Later writes into the result (autograd summing gradients in place) are none of the module's amax.
        quantizer = Float8CurrentScalingQuantizer(quantizer.format.dtype)
    return Float8Tensor(storage.with_tensors(storage.tensors(), dtype), quantizer=quantizer)


def _keep(operand: Operand, kept: Copies) -> Operand | None:
    if not isinstance(operand, QuantizedStorage):
        return operand
    if not (kept.rowwise or kept.columnwise):
        return None
    return operand.keep(rowwise=kept.rowwise, columnwise=kept.columnwise)


def _grad_operand(grad_output: torch.Tensor, call: LinearCall) -> tuple[Operand | None, torch.Tensor | None]:
    """What dgrad and wgrad read, None where neither runs, and the bias gradient, made from the unquantized one."""
    plan, quantizers = call.plan, call.quantizers
    if not (plan.key.dgrad or plan.key.wgrad):
        return None, _bias_grad(grad_output, plan)
    if quantizers is None:
        return plain_rows(grad_output), _bias_grad(grad_output, plan)
    if isinstance(quantizers.backward_state, DelayedScalingState) and call.region is not None:
        call.region.queue.add(quantizers.backward_state, forward=False)
    made, quantizer = plan.copies.grad_made, quantizers.grad_output
    if isinstance(grad_output, Float8Tensor) and grad_output.quantized_storage.format is quantizer.format:
        return quantized_rows(grad_output, made, plan.order), _bias_grad(grad_output, plan)
    rows = plain_rows(grad_output)
    if plan.bias_grad_quantize is None:
        return _quantize(rows, quantizer, made, plan.casts.grad_output), None
    arguments = quantizer.fused_arguments(rowwise=made.rowwise, columnwise=made.columnwise)
    storage, grad_bias = plan.bias_grad_quantize(rows, **arguments)
    quantizer.tell_observer(storage, rows)
    return storage, grad_bias


def _bias_grad(grad_output: torch.Tensor, plan: LinearPlan) -> torch.Tensor | None:
    if plan.bias_grad is None:
        return None
    gradient: torch.Tensor = plan.bias_grad(plain_rows(grad_output), out_dtype=plan.key.dtype)
    return gradient


def _wgrad(grad: Operand, kept: Operand | None, call: LinearCall) -> torch.Tensor | None:
    plan, key, quantizers = call.plan, call.plan.key, call.quantizers
    if quantizers is not None and key.keeps_original_input and isinstance(kept, torch.Tensor):
        kept = _quantize(kept, quantizers.input, plan.copies.input_remade, plan.casts.input_again)
    if plan.wgrad is not None:
        gradient: torch.Tensor = plan.wgrad(grad, kept, layout="wgrad", out_dtype=key.dtype)
        return gradient
    if key.main_grad_dtype is None:
        return None
    main_grad = main_grad_of(call.module, call.parameter, dtype=key.main_grad_dtype)
    accumulate = should_accumulate(call.parameter, call.first_microbatch)
    plan.wgrad_into[accumulate](
        grad, kept, layout="wgrad", out=main_grad, accumulate=accumulate, out_dtype=main_grad.dtype
    )
    return gradient_for_autograd(call.parameter, key.dtype)
