"""Fused norms: the result is cast in the same pass. Compositions: te_hal.ops.fused_compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema import fused as schemas
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    import torch

    from te_hal.schema.storage import QuantizedStorage

_enter_layernorm_quantize = entry(schemas.LAYERNORM_QUANTIZE)
_enter_rmsnorm_quantize = entry(schemas.RMSNORM_QUANTIZE)


def layernorm_quantize(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> tuple[QuantizedStorage, torch.Tensor, torch.Tensor]:
    """layernorm_fwd and the cast of its result, which is rounded to input's dtype first unless ``scale`` is given (F1).

    Args:
        input: ``[..., H]``; fp32, fp16 or bf16, as weight and bias.
        weight: gamma ``[H]``.
        bias: beta ``[H]``.
        epsilon: added to the variance, not negative.
        zero_centered_gamma: ``weight`` holds gamma - 1; the one is added in fp32.
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
        A storage ``[..., H]`` of nominal dtype that of ``input``; mean and rstd of each row, fp32, shape ``[...]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_layernorm_quantize(
        input,
        weight,
        bias,
        scale,
        amax,
        epsilon,
        zero_centered_gamma,
        dtype,
        mode,
        rowwise,
        columnwise,
        columnwise_order,
        amax_epsilon,
        power_of_2,
        rounding_seed,
    )
    result: tuple[QuantizedStorage, torch.Tensor, torch.Tensor] = kernel(
        input,
        weight,
        bias,
        scale,
        amax=amax,
        epsilon=epsilon,
        zero_centered_gamma=zero_centered_gamma,
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


def rmsnorm_quantize(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> tuple[QuantizedStorage, torch.Tensor]:
    """rmsnorm_fwd and the cast of its result, which is rounded to input's dtype first unless ``scale`` is given (F1).

    Args:
        input: ``[..., H]``; fp32, fp16 or bf16, as weight.
        weight: gamma ``[H]``.
        epsilon: added to the mean square, not negative.
        zero_centered_gamma: ``weight`` holds gamma - 1; the one is added in fp32.
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
        A storage ``[..., H]`` of nominal dtype that of ``input``; rstd of each row, fp32, shape ``[...]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_rmsnorm_quantize(
        input,
        weight,
        scale,
        amax,
        epsilon,
        zero_centered_gamma,
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
        input,
        weight,
        scale,
        amax=amax,
        epsilon=epsilon,
        zero_centered_gamma=zero_centered_gamma,
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
