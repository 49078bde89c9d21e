"""Fused casts of what is given: with the amax that scales it, and with the gradient of a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema import fused as schemas
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    import torch

    from te_hal.schema.storage import QuantizedStorage

_enter_quantize_current = entry(schemas.QUANTIZE_CURRENT)
_enter_bias_grad_quantize = entry(schemas.BIAS_GRAD_QUANTIZE)


def quantize_current(
    input: torch.Tensor,
    *,
    out: QuantizedStorage | None = None,
    dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
) -> QuantizedStorage:
    """amax, compute_scale and quantize: cast by the scale that the tensor's own amax gives (A1, S1 to S4, C1 to C5).

    Args:
        input: any shape; fp32, fp16 or bf16.
        out: storage to refill in place; must have the shape, format and copies that are asked for.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise: make the rowwise copy.
        columnwise: make the columnwise copy.
        columnwise_order: memory order of the columnwise copy.
        amax_epsilon: floor of amax, from 0 to fp32's largest.
        power_of_2: round the scale down to a power of two.

    Returns:
        A storage with the asked copies, nominal dtype that of ``input``; ``out`` itself where given.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_quantize_current(input, out, dtype, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2)
    result: QuantizedStorage = kernel(
        input,
        out=out,
        dtype=dtype,
        rowwise=rowwise,
        columnwise=columnwise,
        columnwise_order=columnwise_order,
        amax_epsilon=amax_epsilon,
        power_of_2=power_of_2,
    )
    return result


def bias_grad_quantize(
    grad_output: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> tuple[QuantizedStorage, torch.Tensor]:
    """bias_grad and the cast of one gradient, which is read once where the backend can (G5, C1 to C5).

    Args:
        grad_output: ``[M, N]``; fp32, fp16 or bf16.
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
        A storage ``[M, N]``; the sum over rows, ``[N]`` in grad_output's dtype.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_bias_grad_quantize(
        grad_output,
        scale,
        amax,
        dtype,
        mode,
        rowwise,
        columnwise,
        columnwise_order,
        amax_epsilon,
        power_of_2,
        rounding_seed,
    )
    result: tuple[QuantizedStorage, torch.Tensor] = kernel(
        grad_output,
        scale,
        amax=amax,
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
