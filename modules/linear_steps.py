"""The steps of a product in forward and backward, over plain or quantized operands, for the Functions of modules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from te_hal.modules import offload_marks
from te_hal.modules.main_grad import asked_for, gradient_for_autograd, main_grad_of, should_accumulate
from te_hal.modules.rows import plain_rows, quantized_rows
from te_hal.quantization import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from te_hal.quantization.hybrid_storage import HybridStorage
from te_hal.quantization.quantized_tensor import wrap
from te_hal.schema.formats import ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.quantizer import CastKernels, Quantizer

    Operand = torch.Tensor | QuantizedStorage | HybridStorage
    Kept = torch.Tensor | QuantizedStorage | None


def quantize(rows: torch.Tensor, quantizer: Quantizer, made: Copies, kernels: CastKernels) -> Operand:
    """The copies that gemms read, by kernels of a plan; a plain tensor from a quantizer that makes no codes."""
    return quantizer.operand(rows, rowwise=made.rowwise, columnwise=made.columnwise, kernels=kernels)


def cast_by(
    quantizer: Quantizer,
    made: Copies,
    kernel: Callable[..., Any],
    *operands: torch.Tensor,
    tensor: torch.Tensor | None = None,
    **settings: Any,  # noqa: ANN401 - the op's
) -> tuple[Any, ...]:
    """The results of an op that computes and casts, its storage first; the quantizer's observer is told.

    Args:
        quantizer: says how the result is cast.
        made: which copies of it.
        kernel: of the op.
        operands: of the op, its own.
        tensor: what is cast, where it exists as a plain tensor.
        settings: of the op, its own.
    """
    cast = quantizer.fused_arguments(rowwise=made.rowwise, columnwise=made.columnwise)
    results = kernel(*operands, **settings, **cast)
    results = results if isinstance(results, tuple) else (results,)
    quantizer.tell_observer(results[0], tensor)
    return results


def input_operand(input: torch.Tensor, call: LinearCall) -> Operand:
    """What fprop reads of ``[..., K]``: its rows, quantized under FP8."""
    if isinstance(input, Float8Tensor):
        return quantized_rows(input, call.plan.copies.input_made, call.plan.order)
    rows = plain_rows(input)
    if call.quantizers is None:
        return rows
    return quantize(rows, call.quantizers.input, call.plan.copies.input_made, call.plan.casts.input)


def fprop(
    input: Operand, weight: Operand, bias: torch.Tensor | None, plan: LinearPlan, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias``, ``[M, out_features]``; in ``out`` where the plan's products write into one."""
    key = plan.key
    if bias is not None and bias.dtype is not key.bias_dtype:
        bias = bias.to(key.bias_dtype)
    into = {} if out is None else {"out": out}
    a, b = _rowwise(input), _rowwise(weight)
    output: torch.Tensor = plan.fprop(a, b, bias=bias, out_dtype=key.result_dtype("output"), **into)
    return output


def kept_input(input: Operand, plan: LinearPlan, plain: torch.Tensor | None = None) -> Kept:
    """What is kept of the input for wgrad; None where it will not run, the input itself where the plan keeps that.

    Args:
        input: what fprop read.
        plan: of the product.
        plain: the input as it came, for those that keep that; a quantized one is dequantized.
    """
    if plan.key.keeps_original_input and plain is not None:
        return plain_rows(plain)
    return _kept(input, plan, plan.copies.input_kept, plain) if plan.key.wgrad else None


def kept_weight(weight: Operand, plan: LinearPlan, plain: torch.Tensor | None = None) -> Kept:
    """What is kept of the weight for dgrad; None where it will not run. Arguments as of :func:`kept_input`."""
    kept = _kept(weight, plan, plan.copies.weight_kept, plain) if plan.key.dgrad else None
    if offload_marks.collects():
        offload_marks.note_staying(*(kept.tensors() if isinstance(kept, QuantizedStorage) else (kept,)))
    return kept


def _kept(operand: Operand, plan: LinearPlan, kept: Copies, plain: torch.Tensor | None) -> Kept:
    if plan.key.override == "high_precision" and plain is not None:
        return plain_rows(plain)
    return operand.columnwise if isinstance(operand, HybridStorage) else _keep(operand, kept)


def _rowwise(operand: Any) -> Any:  # noqa: ANN401 - an operand, or None
    """What the first of the two products that read an operand gets."""
    return operand.rowwise if isinstance(operand, HybridStorage) else operand


def _columnwise(operand: Any) -> Any:  # noqa: ANN401 - the same
    """What the second one gets."""
    return operand.columnwise if isinstance(operand, HybridStorage) else operand


def _keep(operand: torch.Tensor | QuantizedStorage, kept: Copies) -> Kept:
    if not isinstance(operand, QuantizedStorage):
        return operand
    if not (kept.rowwise or kept.columnwise):
        return None
    return operand.keep(rowwise=kept.rowwise, columnwise=kept.columnwise)


def grad_operand(grad_output: torch.Tensor, call: LinearCall) -> tuple[Operand | None, torch.Tensor | None]:
    """What dgrad and wgrad read, None where neither runs, and the bias gradient, made from the unquantized one."""
    plan, quantizers = call.plan, call.quantizers
    if not (plan.key.dgrad or plan.key.wgrad):
        return None, _bias_grad(grad_output, plan)
    if quantizers is None:
        return plain_rows(grad_output), _bias_grad(grad_output, plan)
    note_backward(call)
    made, quantizer = plan.copies.grad_made, quantizers.grad_output
    if _fits(grad_output, quantizer):
        return quantized_rows(grad_output, made, plan.order), _bias_grad(grad_output, plan)
    rows = plain_rows(grad_output)
    if plan.bias_grad_quantize is None:
        return quantize(rows, quantizer, made, plan.casts.grad_output), _bias_grad(rows, plan)
    storage, grad_bias = cast_by(quantizer, made, plan.bias_grad_quantize, rows, tensor=rows)
    return storage, grad_bias


def _fits(grad_output: torch.Tensor, quantizer: Quantizer) -> TypeGuard[Float8Tensor]:
    """Whether a gradient comes quantized as the products read it; both copies then follow from either."""
    if not (isinstance(grad_output, Float8Tensor) and quantizer.quantizes) or quantizer.mode is not ScalingMode.TENSOR:
        return False
    return grad_output.quantized_storage.format is quantizer.format


def note_backward(call: LinearCall) -> None:
    """Have the backward scaling state updated when the region's backward ends: a gradient is about to be cast."""
    quantizers, region = call.quantizers, call.region
    state = None if quantizers is None else quantizers.backward_state.delayed
    if region is not None and state is not None:
        region.queue.add(state, forward=False, selection=call.plan.selection)


def end_backward(call: LinearCall) -> None:
    """The update of backward scaling states, where it is this call's to make."""
    if call.updates_backward and call.region is not None:
        call.region.queue.update(forward=False)


def _bias_grad(grad_output: torch.Tensor, plan: LinearPlan) -> torch.Tensor | None:
    if plan.bias_grad is None:
        return None
    gradient: torch.Tensor = plan.bias_grad(plain_rows(grad_output), out_dtype=plan.key.dtype)
    return gradient


def dgrad(
    grad: Operand, weight: Operand | None, plan: LinearPlan, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """``grad @ weight``, ``[M, in_features]``, in ``out`` as :func:`fprop`; None where nobody asks for it."""
    if plan.dgrad is None:
        return None
    key = plan.key
    if plan.dequantize_weight is not None:
        weight = plan.dequantize_weight(weight, out_dtype=key.dtype)
    into = {} if out is None else {"out": out}
    out_dtype = key.result_dtype("grad_input")
    product: torch.Tensor = plan.dgrad(_rowwise(grad), weight, layout="dgrad", out_dtype=out_dtype, **into)
    return product


def wgrad(grad: Operand, kept: Operand | None, call: LinearCall) -> torch.Tensor | None:
    """``grad.T @ input`` for autograd, or into main_grad; None where nobody asks for it, or main_grad has it.

    None too where the module leaves it for later (te_hal.modules.delayed_wgrad).

    Raises:
        StateError: ``main_grad`` is gone or does not fit any more.
    """
    grad = _columnwise(grad)
    if call.delayed is None or not call.plan.key.wgrad:
        if call.plan.key.main_grad_dtype is not None and not asked_for(call.parameter):
            return None
        return _wgrad_now(grad, kept, call)
    call.delayed.put(partial(_wgrad_later, grad, kept, call), grad, kept)
    return None


def _wgrad_later(grad: Operand, kept: Operand | None, call: LinearCall) -> torch.Tensor | None:
    gradient = _wgrad_now(grad, kept, call)
    return gradient if call.plan.key.main_grad_dtype is None else None  # no hooks of autograd's run any more


def _wgrad_now(grad: Operand, kept: Operand | None, call: LinearCall) -> torch.Tensor | None:
    plan, key, quantizers = call.plan, call.plan.key, call.quantizers
    if isinstance(kept, torch.Tensor):
        kept = plain_rows(kept)
    if quantizers is not None and key.keeps_original_input and isinstance(kept, torch.Tensor):
        kept = _columnwise(quantize(kept, quantizers.input, plan.copies.input_remade, plan.casts.input_again))
    if plan.dequantize_input is not None:
        kept = plan.dequantize_input(kept, out_dtype=key.dtype)
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


def quantized_output(output: torch.Tensor, call: LinearCall) -> torch.Tensor:
    """The layer's result as it leaves: a Float8Tensor where the call asks for it."""
    if not call.plan.key.fp8_output or call.quantizers is None:
        return output
    return quantize_result(output, call.quantizers.output, call.plan.casts.output, call.plan.key.dtype)


def quantize_result(
    result: torch.Tensor, quantizer: Quantizer, kernels: CastKernels, dtype: torch.dtype
) -> torch.Tensor:
    """A result in ``dtype`` as a quantized tensor, rowwise copy only; plain from a quantizer that makes no codes."""
    storage = quantizer.operand(result, rowwise=True, columnwise=False, kernels=kernels)
    if isinstance(storage, torch.Tensor):
        return storage
    if isinstance(quantizer, Float8Quantizer):
        # Later writes into the result (autograd summing gradients in place) are none of the module's amax.
        quantizer = Float8CurrentScalingQuantizer(quantizer.format.dtype)
    return wrap(storage.with_tensors(storage.tensors(), dtype), quantizer=quantizer)
