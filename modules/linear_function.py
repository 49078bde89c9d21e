"""The autograd Function of a linear layer: three gemms over plain or quantized operands, run by a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import te_hal.ops
from te_hal.modules.main_grad import FirstMicrobatch, gradient_for_autograd, main_grad_of, should_accumulate
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.quantization.copies import with_copies
from te_hal.quantization.float8_quantizer import Float8Quantizer
from te_hal.quantization.float8_tensor import Float8Tensor
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_hal.modules.plan import Casts, Copies, LinearPlan
    from te_hal.quantization.autocast import Region
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.quantization.scaling_state import ScalingState

    Operand = torch.Tensor | QuantizedStorage


@dataclass(slots=True)
class Quantizers:
    """The quantizers of one call, and the state that rolls after its backward."""

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    backward_state: ScalingState


@dataclass(slots=True)
class LinearCall:
    """One forward of a linear layer: everything but the tensors that autograd follows.

    Attributes:
        module: label, for messages.
        plan: what runs.
        quantizers: None without FP8.
        cached_weight: the quantized weight to use instead of quantizing, if any.
        parameter: the weight as the user holds it (main_grad belongs to it).
        first_microbatch: set where ``is_first_microbatch`` is True.
        into_main_grad: wgrad goes to ``parameter.main_grad``.
        region: the autocast region, None without FP8.
        updates_backward: this call's backward ends with the update of backward scaling states.
        quantized_weight: filled by the forward, for the module's cache.
    """

    module: str
    plan: LinearPlan
    quantizers: Quantizers | None
    cached_weight: QuantizedStorage | None
    parameter: torch.Tensor
    first_microbatch: FirstMicrobatch | None
    into_main_grad: bool
    fp8_output: bool
    fp8_grad: bool
    keeps_original_input: bool
    dgrad: bool
    wgrad: bool
    region: Region | None = None
    updates_backward: bool = False
    quantized_weight: QuantizedStorage | None = None


class LinearFunction(torch.autograd.Function):
    """``y = x @ weight.T + bias``, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: LinearCall,
    ) -> torch.Tensor:
        """Run fprop.

        Args:
            ctx: autograd's context.
            input: ``[..., in_features]``, plain or a Float8Tensor.
            weight: ``[out_features, in_features]`` in the activation dtype.
            bias: ``[out_features]`` or None.
            call: the rest.

        Returns:
            ``[..., out_features]`` in the activation dtype; a Float8Tensor where the call asks for it.
        """
        plan = call.plan
        operand, original = _input_operand(input, call)
        weight_operand = _weight_operand(weight, call)
        output = plan.fprop(
            operand, weight_operand, bias=_bias(bias, weight.dtype, call), out_dtype=_output_dtype(weight.dtype, call)
        )
        saved_input = original if call.keeps_original_input else _keep(operand, plan.copies.input_kept)
        saved_weight = _keep(weight_operand, plan.copies.weight_kept)
        tensors, ctx.rebuilds = prepare_for_saving(
            saved_input if call.wgrad else None, saved_weight if call.dgrad else None
        )
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape, ctx.dtype = call, input.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = output.view(*input.shape[:-1], output.shape[-1])
        return _quantize_result(output, call.quantizers.output, weight.dtype) if _wants_fp8_output(call) else output  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run dgrad, wgrad and the bias gradient, as far as they are asked for."""
        call: LinearCall = ctx.call
        saved_input, saved_weight = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = te_hal.ops.bias_grad(_plain_rows(grad_output), out_dtype=ctx.bias_dtype)
        operand = _grad_operand(grad_output, ctx.dtype, call)
        grad_input = _dgrad(ctx, operand, saved_weight, call) if call.dgrad else None
        grad_weight = _wgrad(ctx.dtype, operand, saved_input, call) if call.wgrad else None
        if call.updates_backward and call.region is not None:
            call.region.queue.update(forward=False)
        return grad_input, grad_weight, grad_bias, None


def _input_operand(input: torch.Tensor, call: LinearCall) -> tuple[Operand, torch.Tensor | None]:
    """The operand of fprop, and the original input where that is what the backward keeps."""
    if isinstance(input, Float8Tensor):
        storage = _as_rows(input)
        made = call.plan.copies.input_made
        if call.quantizers is None:
            return te_hal.ops.dequantize(storage), None
        return with_copies(storage, rowwise=made.rowwise, columnwise=made.columnwise, order=call.plan.order), None
    rows = input.reshape(-1, input.shape[-1])
    if call.quantizers is None:
        return rows, rows
    return _quantize(rows, call.quantizers.input, call.plan.copies.input_made, call.plan.cast_input), rows


def _as_rows(tensor: Float8Tensor) -> QuantizedStorage:
    rows = tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])  # noqa: PLR2004 - a matrix
    if not isinstance(rows, Float8Tensor):
        raise UnsupportedError(
            "Linear",
            got=f"{tensor.quantized_storage!r}",
            accepted="a matrix, or a Float8Tensor with a rowwise copy",
            todo="quantize with rowwise=True",
        )
    return rows.quantized_storage


def _weight_operand(weight: torch.Tensor, call: LinearCall) -> Operand:
    if call.quantizers is None:
        return weight
    storage = call.cached_weight
    if storage is None:
        storage = _quantize(weight, call.quantizers.weight, call.plan.copies.weight_made, call.plan.cast_weight)
        call.quantized_weight = storage
    return storage


def _quantize(rows: torch.Tensor, quantizer: Quantizer, made: Copies, kernels: Casts | None) -> QuantizedStorage:
    return quantizer.quantize_storage(
        rows,
        rowwise=made.rowwise,
        columnwise=made.columnwise,
        kernels=kernels,  # type: ignore[arg-type] # a plan with quantizers has them bound
    )


def _bias(bias: torch.Tensor | None, dtype: torch.dtype, call: LinearCall) -> torch.Tensor | None:
    """Under FP8 an fp32 bias is rounded to bf16 first, as in Transformer Engine (docs/numerics.md, G4)."""
    if bias is None or call.quantizers is None or dtype != torch.float32:
        return bias
    return bias.to(torch.bfloat16)


def _wants_fp8_output(call: LinearCall) -> bool:
    return call.fp8_output and call.quantizers is not None


def _output_dtype(dtype: torch.dtype, call: LinearCall) -> torch.dtype:
    """Delayed scaling quantizes the fp32 result, current scaling the rounded one (docs/numerics.md, F1)."""
    if _wants_fp8_output(call) and isinstance(call.quantizers.output, Float8Quantizer):  # type: ignore[union-attr]
        return torch.float32
    return dtype


def _quantize_result(result: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Float8Tensor:
    storage = quantizer.quantize_storage(result, rowwise=True, columnwise=False)
    return Float8Tensor(storage.with_tensors(storage.tensors(), dtype), quantizer=quantizer)


def _keep(operand: Operand, kept: Copies) -> Operand | None:
    if not isinstance(operand, QuantizedStorage):
        return operand
    if not (kept.rowwise or kept.columnwise):
        return None
    return operand.keep(rowwise=kept.rowwise, columnwise=kept.columnwise)


def _plain_rows(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.dequantize() if isinstance(tensor, Float8Tensor) else tensor
    return plain.reshape(-1, plain.shape[-1])


def _grad_operand(grad_output: torch.Tensor, dtype: torch.dtype, call: LinearCall) -> Operand | None:
    if not (call.dgrad or call.wgrad):
        return None
    if call.quantizers is None:
        return _plain_rows(grad_output).to(dtype)
    made = call.plan.copies.grad_made
    if isinstance(grad_output, Float8Tensor):
        storage = _as_rows(grad_output)
        return with_copies(storage, rowwise=made.rowwise, columnwise=made.columnwise, order=call.plan.order)
    if call.region is not None and hasattr(call.quantizers.backward_state, "update"):
        call.region.queue.add(call.quantizers.backward_state, forward=False)
    rows = _plain_rows(grad_output).to(dtype)
    return _quantize(rows, call.quantizers.grad_output, made, call.plan.cast_grad)


def _dgrad(ctx: Any, grad: Operand | None, weight: Operand | None, call: LinearCall) -> torch.Tensor:  # noqa: ANN401
    wants_fp8 = call.fp8_grad and call.quantizers is not None
    result = call.plan.dgrad(grad, weight, layout="dgrad", out_dtype=ctx.dtype)  # type: ignore[misc] # bound, as dgrad is asked for
    result = result.view(ctx.input_shape)
    if not wants_fp8:
        return result  # type: ignore[no-any-return]
    return _quantize_result(result, call.quantizers.grad_input, ctx.dtype)  # type: ignore[union-attr]


def _wgrad(dtype: torch.dtype, grad: Operand | None, kept: Operand | None, call: LinearCall) -> torch.Tensor | None:
    plan = call.plan
    if call.keeps_original_input and call.quantizers is not None:
        kept = _quantize(kept, call.quantizers.input, plan.copies.input_made, plan.cast_input)  # type: ignore[arg-type]
    if not call.into_main_grad:
        return plan.wgrad(grad, kept, layout="wgrad", out_dtype=dtype)  # type: ignore[misc,no-any-return]
    main_grad = main_grad_of(call.module, call.parameter)
    accumulate = should_accumulate(call.parameter, call.first_microbatch)
    plan.wgrad_into[accumulate](
        grad, kept, layout="wgrad", out=main_grad, accumulate=accumulate, out_dtype=main_grad.dtype
    )
    return gradient_for_autograd(call.parameter, dtype)
