"""The activation between two products: in one pass with the cast under FP8, by itself elsewhere; and its backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from te_hal.dispatch import resolve
from te_hal.modules import linear_steps
from te_hal.quantization.linear_calls import fused_call
from te_hal.schema.activation import ACTIVATIONS, GATED
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import Call

if TYPE_CHECKING:
    import torch

    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_key import PlanKey
    from te_hal.quantization.linear_calls import LinearCopies
    from te_hal.quantization.operand_formats import OperandFormat
    from te_hal.schema.formats import ColumnwiseOrder
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
        adds_bias: the first product leaves its bias out; it is added in fp32 here (F4).
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
        forward, backward: the activation alone; where the stage adds the bias, with that.
        quantize, backward_quantize: with the cast of its result.
    """

    key: ActivationKey
    forward: Any
    backward: Any
    quantize: Any
    backward_quantize: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The op's arguments that say what is computed."""
        return {"activation": self.key.name, **dict(self.key.parameters)}


def check_activation(where: str, name: object, parameters: object) -> tuple[tuple[str, float], ...]:
    """An activation that exists, with parameters that it has.

    Returns:
        The parameters as pairs.

    Raises:
        ArgumentError: an unknown activation; a parameter that it lacks, that is no finite number, or a negative limit.
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
    for key, value in given.items():
        if not math.isfinite(value) or (key == "limit" and value < 0):
            raise ArgumentError(
                f"{where}: activation_params",
                got=f"{key}={value!r}",
                accepted="finite numbers, a limit of at least 0",
                todo="correct it; a limit beyond all values clamps nothing",
            )
    return tuple((key, float(value)) for key, value in sorted(given.items()))


def is_gated(name: str) -> bool:
    """Whether the activation takes twice as many values as it gives."""
    return name in GATED


def casts_gradient(of: OperandFormat | None) -> bool:
    """Whether the activation's backward also casts: not where the tensor's own amax gives its scale (F5)."""
    return of is not None and (of.delayed or of.mode != ScalingMode.TENSOR)


class ProductBefore(Protocol):
    """What the activation's backward must know of the product whose gradient it gives; every LinearPlan does."""

    @property
    def key(self) -> PlanKey:
        """Says who casts the gradient."""

    @property
    def copies(self) -> LinearCopies:
        """Of the operands, the gradient among them."""

    @property
    def order(self) -> ColumnwiseOrder:
        """Memory order of columnwise copies."""


def make_activation_stage(key: ActivationKey, first: ProductBefore | None, second: LinearPlan) -> ActivationStage:
    """Bind the kernels.

    Args:
        key: the activation.
        first: the product before it; its key says who casts its gradient, and whether one is wanted. None: there is
            none, and nobody casts.
        second: the product behind it; its key says who casts its input.
    """
    forward, quantize = _forward_kernels(key, second)
    backward, backward_quantize = _backward_kernels(key, first, wanted=second.key.dgrad)
    return ActivationStage(key, forward, backward, quantize, backward_quantize)


def _forward_kernels(key: ActivationKey, second: LinearPlan) -> tuple[Any, Any]:
    """The activation alone, or with the cast; None for the other."""
    of = second.key.format_of("input") if second.key.input_is_quantized else None
    if of is None:
        return _resolve_plain("fwd", key, {}), None
    made = of.kind(second.copies.input_made, second.order)
    kinds: dict[str, Kind] = {"input": key.dtype}
    call = fused_call("activation_quantize", key.device, kinds, made, delayed=of.delayed, activation=key.name)
    return None, resolve(call).kernel


def _backward_kernels(key: ActivationKey, first: ProductBefore | None, *, wanted: bool) -> tuple[Any, Any]:
    """The backward alone, or with the cast; None for what does not run."""
    of = first.key.format_of("grad_output") if first is not None and first.key.grad_is_quantized else None
    if first is not None and of is not None and (first.key.dgrad or first.key.wgrad):
        made = of.kind(first.copies.grad_made, first.order)
        kinds: dict[str, Kind] = {"grad_output": key.dtype, "input": key.dtype}
        own = {"activation": key.name, "bias_grad": first.key.bias_grad}
        call = fused_call("activation_bwd_quantize", key.device, kinds, made, delayed=of.delayed, **own)
        return None, resolve(call).kernel
    return (_resolve_plain("bwd", key, {"grad_output": key.dtype}) if wanted else None), None


def _resolve_plain(direction: str, key: ActivationKey, grad: dict[str, Kind]) -> Any:  # noqa: ANN401 - a kernel
    """The activation without a cast, with the bias where the stage adds it; it gives the activation dtype."""
    kinds: dict[str, Kind] = {**grad, "input": key.dtype}
    flags: dict[str, object] = {"activation": key.name, "out_dtype": key.dtype}
    if not key.adds_bias:
        return resolve(Call(f"activation_{direction}", key.device, kinds, flags)).kernel
    if grad:
        flags["bias_grad"] = key.bias_grad
    return resolve(Call(f"bias_activation_{direction}", key.device, {**kinds, "bias": key.dtype}, flags)).kernel


def activate(
    result: torch.Tensor, bias: torch.Tensor | None, stage: ActivationStage, call: LinearCall
) -> tuple[Operand, torch.Tensor | None]:
    """The activation of the first product's result ``[M, F or 2F]``, for the product of ``call`` (F2).

    Args:
        result: in the activation dtype.
        bias: what is added to it first, where the stage adds it.
        stage: the kernels.
        call: of the second product.

    Returns:
        What fprop reads; the result in the activation dtype, None where no such tensor exists.
    """
    if stage.quantize is not None and call.quantizers is not None:
        quantizer, made = call.quantizers.input, call.plan.copies.input_made
        storage: QuantizedStorage = linear_steps.cast_by(quantizer, made, stage.quantize, result, **stage.arguments)[0]
        return storage, None
    given = (result,) if bias is None else (result, bias)
    output = stage.forward(*given, **stage.arguments, out_dtype=stage.key.dtype)
    return linear_steps.input_operand(output, call), output


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
    grad_input, grad_bias = stage.backward(
        grad, result, bias, **stage.arguments, bias_grad=stage.key.bias_grad, out_dtype=grad.dtype
    )
    return (grad_input if key.dgrad or key.wgrad else None), grad_bias
