"""The activation between two products: in one pass with the cast under FP8, by itself elsewhere; and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import resolve
from te_hal.modules import linear_steps
from te_hal.ops.pieces import in_one, row_pieces
from te_hal.quantization.linear_calls import fused_call
from te_hal.schema.activation import ACTIVATIONS, GATED
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization.operand_formats import OperandFormat
    from te_hal.schema.storage import QuantizedStorage
    from te_hal.schema.support import Kind

#: Parameters of an activation, by its name; the others have none.
_PARAMETERS = {"clamped_swiglu": ("limit", "alpha", "glu_linear_offset")}


class ActivationKey(NamedTuple):
    """What is computed, and where.

    Attributes:
        name: of the activation.
        parameters: pairs of name and value.
        dtype: of the activations.
        device: theirs.
        adds_bias: the first product leaves its bias out; it is added in fp32 here.
        bias_grad: that bias needs a gradient.
    """

    name: str
    parameters: tuple[tuple[str, float], ...]
    dtype: torch.dtype
    device: torch.device
    adds_bias: bool
    bias_grad: bool


class ActivationStage(NamedTuple):
    """Bound kernels; None for what does not run.

    Attributes:
        key: what is computed.
        forward, backward: the activation alone.
        quantize, backward_quantize: with the cast of its result.
        bias_grad: the sum over rows of the backward's fp32 result, where the stage adds the bias.
    """

    key: ActivationKey
    forward: Any
    backward: Any
    quantize: Any
    backward_quantize: Any
    bias_grad: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The op's arguments that say what is computed."""
        return {"activation": self.key.name, **dict(self.key.parameters)}


def check_activation(where: str, name: object, parameters: object) -> tuple[tuple[str, float], ...]:
    """An activation that exists, with parameters that it has.

    Returns:
        The parameters as pairs.

    Raises:
        ArgumentError: an unknown activation; a parameter that it lacks, or that is no number.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ArgumentError(
            f"{where}: activation", got=repr(name), accepted=", ".join(ACTIVATIONS), todo="correct the name"
        )
    allowed = _PARAMETERS.get(name, ())
    given = {} if parameters is None else parameters
    numbers = isinstance(given, dict) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in given.values()
    )
    if not isinstance(given, dict) or not numbers or not set(given) <= set(allowed):
        raise ArgumentError(
            f"{where}: activation_params",
            got=repr(parameters),
            accepted=f"a dict of numbers with keys among {', '.join(allowed)}" if allowed else f"None: {name} has none",
            todo="correct it",
        )
    return tuple((key, float(value)) for key, value in sorted(given.items()))


def is_gated(name: str) -> bool:
    """Whether the activation takes twice as many values as it gives."""
    return name in GATED


def casts_gradient(of: OperandFormat | None) -> bool:
    """Whether the activation's backward also casts: not where the tensor's own amax gives its scale (F5)."""
    return of is not None and (of.delayed or of.mode != ScalingMode.TENSOR)


def make_activation_stage(key: ActivationKey, first: LinearPlan, second: LinearPlan) -> ActivationStage:
    """Bind the kernels.

    Args:
        key: the activation.
        first: the product before it; its key says who casts its gradient, and whether one is wanted.
        second: the product behind it; its key says who casts its input.
    """
    forward, quantize = _forward_kernels(key, second)
    backward, backward_quantize, bias_grad = _backward_kernels(key, first, wanted=second.key.dgrad)
    return ActivationStage(key, forward, backward, quantize, backward_quantize, bias_grad)


def _forward_kernels(key: ActivationKey, second: LinearPlan) -> tuple[Any, Any]:
    """The activation alone, or with the cast; None for the other."""
    kinds: dict[str, Kind] = {"input": torch.float32 if key.adds_bias else key.dtype}
    of = second.key.format_of("input") if second.key.input_is_quantized else None
    if of is None:
        flags = {"activation": key.name, "out_dtype": key.dtype}
        return resolve(Call("activation_fwd", key.device, kinds, flags)).kernel, None
    made = of.kind(second.copies.input_made, second.order)
    call = fused_call("activation_quantize", key.device, kinds, made, delayed=of.delayed, activation=key.name)
    return None, resolve(call).kernel


def _backward_kernels(key: ActivationKey, first: LinearPlan, *, wanted: bool) -> tuple[Any, Any, Any]:
    """The backward alone, with the cast, and the sum of its fp32 result; None for what does not run."""
    inside = torch.float32 if key.adds_bias else key.dtype
    kinds: dict[str, Kind] = {"grad_output": key.dtype, "input": inside}
    of = first.key.format_of("grad_output") if first.key.grad_is_quantized else None
    if of is not None and (first.key.dgrad or first.key.wgrad):
        made, bias_grad = of.kind(first.copies.grad_made, first.order), first.key.bias_grad
        own = {"activation": key.name, "bias_grad": bias_grad}
        call = fused_call("activation_bwd_quantize", key.device, kinds, made, delayed=of.delayed, **own)
        return None, resolve(call).kernel, None
    if not wanted:
        return None, None, None
    flags = {"activation": key.name, "out_dtype": inside}
    backward = resolve(Call("activation_bwd", key.device, kinds, flags)).kernel
    if not key.bias_grad:
        return backward, None, None
    sums = Call("bias_grad", key.device, {"grad_output": inside}, {"out_dtype": torch.float32})
    return backward, None, resolve(sums).kernel


def activate(result: torch.Tensor, bias: torch.Tensor | None, stage: ActivationStage, call: LinearCall) -> Operand:
    """The activation of the first product's result ``[M, F or 2F]``, for the product of ``call`` (F2).

    Args:
        result: in the activation dtype.
        bias: what is added to it first, where the stage adds it.
        stage: the kernels.
        call: of the second product.
    """
    if stage.quantize is not None and call.quantizers is not None:
        quantizer, made = call.quantizers.input, call.plan.copies.input_made
        storage: QuantizedStorage = linear_steps.cast_by(quantizer, made, stage.quantize, result, **stage.arguments)[0]
        return storage
    if bias is None or in_one(result):
        output = stage.forward(_inside(result, bias), **stage.arguments, out_dtype=stage.key.dtype)
    else:
        output = torch.empty_like(result)  # a bias is added before gelu only, which keeps the shape
        for piece in row_pieces(result):
            output[piece] = stage.forward(_inside(result[piece], bias), **stage.arguments, out_dtype=stage.key.dtype)
    return linear_steps.input_operand(output, call)


def activation_backward(
    grad: torch.Tensor, result: torch.Tensor, bias: torch.Tensor | None, stage: ActivationStage, call: LinearCall
) -> tuple[Operand | None, torch.Tensor | None]:
    """What dgrad and wgrad of the first product read, None where neither runs, and the gradient of its bias.

    Rules F3 to F5 of docs/numerics.md.

    Args:
        grad: of the activation's result, ``[M, F]``.
        result: of the first product, as :func:`activate` got it.
        bias: the same.
        stage: the kernels.
        call: of the first product.
    """
    key = call.plan.key
    if stage.backward_quantize is not None and call.quantizers is not None:
        quantizer, made = call.quantizers.grad_output, call.plan.copies.grad_made
        storage, grad_bias = linear_steps.cast_by(
            quantizer, made, stage.backward_quantize, grad, result, **stage.arguments, bias_grad=key.bias_grad
        )
        return storage, grad_bias
    if bias is None:
        return linear_steps.grad_operand(stage.backward(grad, result, **stage.arguments, out_dtype=grad.dtype), call)
    return _backward_with_bias(grad, result, bias, stage, wanted=key.dgrad or key.wgrad)


def _backward_with_bias(
    grad: torch.Tensor, result: torch.Tensor, bias: torch.Tensor, stage: ActivationStage, *, wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradient, rounded, where it is wanted; and its sum in fp32 over rows, rounded, where that is (F4)."""
    rounded = torch.empty_like(result) if wanted else None
    sums = None if stage.bias_grad is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    for piece in row_pieces(result):
        inside = _inside(result[piece], bias)
        fp32 = stage.backward(grad[piece], inside, **stage.arguments, out_dtype=torch.float32)
        if rounded is not None:
            rounded[piece] = fp32
        if sums is not None:
            sums += stage.bias_grad(fp32, out_dtype=torch.float32)
    return rounded, None if sums is None else sums.to(grad.dtype)


def _inside(result: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What the activation is applied to; with a bias in fp32."""
    return result if bias is None else result + bias.float()
