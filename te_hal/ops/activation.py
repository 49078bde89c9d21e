"""The activation family (optional ops): activation functions, gated or not, and their composition in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import entry, register_composition
from te_hal.ops.activation_formulas import FORMULAS, GATES, swish
from te_hal.ops.pieces import in_one, row_pieces
from te_hal.schema.activation import ACTIVATION_BWD, ACTIVATION_FWD
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

# The parameters of clamped_swiglu where a call leaves them out, as Transformer Engine has them.
_LIMIT, _ALPHA, _LINEAR_OFFSET = 7.0, 1.702, 1.0

_enter_activation_fwd = entry(ACTIVATION_FWD)
_enter_activation_bwd = entry(ACTIVATION_BWD)


def activation_fwd(
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An activation function, computed in fp32, rounded once (V1 to V3).

    Args:
        input: ``[..., F]``, or ``[..., 2F]`` for gated kinds: first half activated, second half multiplies.
        activation: which function.
        limit: clamped_swiglu only; None: 7.0.
        alpha: clamped_swiglu only; None: 1.702.
        glu_linear_offset: clamped_swiglu only; None: 1.0.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        A new tensor ``[..., F]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_fwd(input, activation, limit, alpha, glu_linear_offset, out_dtype)
    result: torch.Tensor = kernel(
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=out_dtype,
    )
    return result


def activation_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gradient of :func:`activation_fwd` with respect to its input, computed in fp32, rounded once (V1 to V3).

    Args:
        grad_output: gradient of the output, ``[..., F]``.
        input: as in the forward.
        activation: as in the forward.
        limit: as in the forward.
        alpha: as in the forward.
        glu_linear_offset: as in the forward.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        A new tensor of input's shape.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_bwd(grad_output, input, activation, limit, alpha, glu_linear_offset, out_dtype)
    result: torch.Tensor = kernel(
        grad_output,
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=out_dtype,
    )
    return result


def _compose_fwd(
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The composition of activation_fwd: V1, gated kinds V2, clamped_swiglu V3."""

    def value(values: torch.Tensor) -> torch.Tensor:
        if activation in FORMULAS:
            return FORMULAS[activation].value(values)
        gate, linear = _halves(values)
        if activation in GATES:
            return FORMULAS[GATES[activation]].value(gate) * linear
        bound, steepness, offset = _clamped_parameters(limit, alpha, glu_linear_offset)
        return swish(steepness).value(gate.clamp(max=bound)) * (linear.clamp(-bound, bound) + offset)

    columns = input.shape[-1] if activation in FORMULAS else input.shape[-1] // 2
    return _in_pieces(value, columns, out_dtype or input.dtype, input)


def _compose_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The composition of activation_bwd; for gated kinds both halves' gradients side by side, as the input has them."""

    def gradient(grad: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if activation in FORMULAS:
            return grad * FORMULAS[activation].slope(values)
        gate, linear = _halves(values)
        if activation in GATES:
            formula = FORMULAS[GATES[activation]]
            return torch.cat((grad * linear * formula.slope(gate), grad * formula.value(gate)), -1)
        parameters = _clamped_parameters(limit, alpha, glu_linear_offset)
        return torch.cat(_clamped_swiglu_grads(grad, gate, linear, *parameters), -1)

    return _in_pieces(gradient, input.shape[-1], out_dtype or input.dtype, grad_output, input)


def _in_pieces(
    compute: Callable[..., torch.Tensor], columns: int, dtype: torch.dtype, *operands: torch.Tensor
) -> torch.Tensor:
    """``compute`` over rows of the operands in fp32, each piece rounded once to ``dtype``: ``[..., columns]``."""
    largest = operands[-1]
    if in_one(largest):
        return compute(*(operand.to(torch.float32) for operand in operands)).to(dtype)
    rows = [operand.reshape(-1, operand.shape[-1]) for operand in operands]
    result = torch.empty(rows[0].shape[0], columns, dtype=dtype, device=largest.device)
    for piece in row_pieces(rows[-1]):
        result[piece] = compute(*(part[piece].to(torch.float32) for part in rows))
    return result.view(*largest.shape[:-1], columns)


def _clamped_swiglu_grads(
    grad: torch.Tensor, gate: torch.Tensor, linear: torch.Tensor, limit: float, alpha: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both halves: 0 where a clamp took hold, passed on at its very edge (V3)."""
    formula = swish(alpha)
    clamped_gate = gate.clamp(max=limit)
    grad_gate = grad * (linear.clamp(-limit, limit) + offset) * formula.slope(clamped_gate)
    grad_linear = grad * formula.value(clamped_gate)
    return grad_gate.masked_fill(gate > limit, 0.0), grad_linear.masked_fill(linear.abs() > limit, 0.0)


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = values.shape[-1] // 2
    return values[..., :half], values[..., half:]


def _clamped_parameters(limit: float | None, alpha: float | None, offset: float | None) -> tuple[float, float, float]:
    bound = _LIMIT if limit is None else limit
    return (
        # torch refuses to clamp at a number that fp32 has as infinite, where there is nothing to clamp.
        bound if abs(bound) <= FLOAT32_MAX else math.copysign(math.inf, bound),
        _ALPHA if alpha is None else alpha,
        _LINEAR_OFFSET if offset is None else offset,
    )


register_composition("activation_fwd", _compose_fwd)
register_composition("activation_bwd", _compose_bwd)
