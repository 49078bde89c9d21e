"""activation_quantize and activation_bwd_quantize through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols, scratch
from te_hal.ffi.marshalling.activation import parameters, result_shape
from te_hal.ffi.marshalling.fused_arguments import CastFlags, FusedCast
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native
    from te_hal.schema.storage import QuantizedStorage

_OP, _OP_BWD = codes.OPS["activation_quantize"], codes.OPS["activation_bwd_quantize"]


def activation_quantize(
    native: Native,
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
    rounding_seed: int | None = None,  # noqa: ARG001 - NVFP4's, which the composition casts
) -> QuantizedStorage:
    """te_hal.ops.activation_quantize for per-tensor scaling."""
    values, kind = contiguous(input), codes.ACTIVATION_KINDS[activation]
    shape = result_shape(values.shape, activation)
    rows, cols = rows_and_cols(shape)
    flags = CastFlags(dtype, mode, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2)
    cast = FusedCast(native, "activation_quantize", values, shape, scale, amax, flags)
    code = codes.DTYPES[values.dtype]
    workspace = native.workspace(
        values.device, _OP, rows=rows, cols=cols, kind=kind, input_dtype=code, output_mode=cast.mode
    )
    status = native.lib.api_activation_quantize(
        native.library.api,
        kind,
        address(values),
        code,
        rows,
        cols,
        *parameters(activation, limit, alpha, glu_linear_offset),
        code,
        *cast.scaling(),
        cast.flags,
        *cast.results(),
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, "activation_quantize")
    return cast.storage


def activation_bwd_quantize(
    native: Native,
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
    rounding_seed: int | None = None,  # noqa: ARG001 - NVFP4's, which the composition casts
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    """te_hal.ops.activation_bwd_quantize for per-tensor scaling."""
    grad, values, kind = contiguous(grad_output), contiguous(input), codes.ACTIVATION_KINDS[activation]
    rows, cols = rows_and_cols(grad.shape)
    flags = CastFlags(dtype, mode, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2)
    cast = FusedCast(native, "activation_bwd_quantize", values, tuple(values.shape), scale, amax, flags)
    code = codes.DTYPES[values.dtype]
    grad_bias = native.empty(values.shape[-1:], values.dtype, values.device) if bias_grad else None
    workspace = native.workspace(
        values.device, _OP_BWD, rows=rows, cols=cols, kind=kind, input_dtype=code, output_mode=cast.mode
    )
    status = native.lib.api_activation_bwd_quantize(
        native.library.api,
        kind,
        address(grad),
        codes.DTYPES[grad.dtype],
        address(values),
        code,
        rows,
        cols,
        *parameters(activation, limit, alpha, glu_linear_offset),
        code,
        address(grad_bias),
        codes.NO_DTYPE if grad_bias is None else code,
        *cast.scaling(),
        cast.flags,
        *cast.results(),
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, "activation_bwd_quantize")
    return cast.storage, grad_bias
