"""Fused activations: the result, or the gradient, is cast in the same pass. See te_hal.ops.fused_compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema import fused as schemas
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    import torch

    from te_hal.schema.storage import QuantizedStorage

_enter_activation_quantize = entry(schemas.ACTIVATION_QUANTIZE)
_enter_activation_bwd_quantize = entry(schemas.ACTIVATION_BWD_QUANTIZE)


def activation_quantize(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> QuantizedStorage:
    """activation_fwd and the cast of its result; without ``scale`` that is rounded first, its amax taken before (F2).

    Args:
        input: ``[..., F]``, or ``[..., 2F]`` for gated kinds; fp32, fp16 or bf16.
        activation: which function; see te_hal.ops.activation_fwd, also for the next three.
        limit: clamped_swiglu only; None: 7.0.
        alpha: clamped_swiglu only; None: 1.702.
        glu_linear_offset: clamped_swiglu only; None: 1.0.
        scale: fp32, one element, factor into the format. None: the result's own amax gives it, or each block's its own.
        amax: with ``scale``: fp32, one element; becomes ``max(amax, max|result|)`` in place (A1).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        mode: how many elements share a scale; with ``scale`` only ``"tensor"``.
        rowwise: make the rowwise copy.
        columnwise: make the columnwise copy.
        columnwise_order: memory order of the columnwise copy.
        amax_epsilon: without ``scale``: floor of amax, from 0 to fp32's largest.
        power_of_2: without ``scale``: round scales down to powers of two.
        rounding_seed: as in te_hal.ops.quantize.

    Returns:
        A storage ``[..., F]`` of nominal dtype that of ``input``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_quantize(
        input,
        scale,
        amax,
        activation,
        limit,
        alpha,
        glu_linear_offset,
        dtype,
        mode,
        rowwise,
        columnwise,
        columnwise_order,
        amax_epsilon,
        power_of_2,
        rounding_seed,
    )
    result: QuantizedStorage = kernel(
        input,
        scale,
        amax=amax,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        dtype=dtype,
        mode=mode,
        rowwise=rowwise,
        columnwise=columnwise,
        columnwise_order=columnwise_order,
        amax_epsilon=amax_epsilon,
        power_of_2=power_of_2,
        rounding_seed=rounding_seed,
    )
    return result


def activation_bwd_quantize(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    bias_grad: bool = False,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    """activation_bwd, the cast of its result and, where asked for, that result's sum over rows (F3).

    Args:
        grad_output: ``[..., F]``; fp32, fp16 or bf16.
        input: ``[..., F]``, or ``[..., 2F]`` for gated kinds, as in the forward.
        activation: which function; see te_hal.ops.activation_fwd, also for the next three.
        limit: clamped_swiglu only; None: 7.0.
        alpha: clamped_swiglu only; None: 1.702.
        glu_linear_offset: clamped_swiglu only; None: 1.0.
        bias_grad: also give the sum over rows of what is cast: the fp32 gradient with ``scale``, else the rounded one.
        scale: fp32, one element, factor into the format. None: the result's own amax gives it, or each block's its own.
        amax: with ``scale``: fp32, one element; becomes ``max(amax, max|result|)`` in place (A1).
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        mode: how many elements share a scale; with ``scale`` only ``"tensor"``.
        rowwise: make the rowwise copy.
        columnwise: make the columnwise copy.
        columnwise_order: memory order of the columnwise copy.
        amax_epsilon: without ``scale``: floor of amax, from 0 to fp32's largest.
        power_of_2: without ``scale``: round scales down to powers of two.
        rounding_seed: as in te_hal.ops.quantize.

    Returns:
        A storage of input's shape and nominal dtype; the bias gradient, ``[F]`` or ``[2F]`` in input's dtype, or None.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_bwd_quantize(
        grad_output,
        input,
        scale,
        amax,
        activation,
        limit,
        alpha,
        glu_linear_offset,
        bias_grad,
        dtype,
        mode,
        rowwise,
        columnwise,
        columnwise_order,
        amax_epsilon,
        power_of_2,
        rounding_seed,
    )
    result: tuple[QuantizedStorage, torch.Tensor | None] = kernel(
        grad_output,
        input,
        scale,
        amax=amax,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        bias_grad=bias_grad,
        dtype=dtype,
        mode=mode,
        rowwise=rowwise,
        columnwise=columnwise,
        columnwise_order=columnwise_order,
        amax_epsilon=amax_epsilon,
        power_of_2=power_of_2,
        rounding_seed=rounding_seed,
    )
    return result
