"""layernorm_quantize and rmsnorm_quantize through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols, scratch
from te_hal.ffi.marshalling.fused_arguments import CastFlags, FusedCast
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.storage import QuantizedStorage

_OP = codes.OPS["norm_quantize"]


class _Norm(NamedTuple):
    """Which norm, and what only one of them has."""

    kind: int
    op: str
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    epsilon: float
    zero_centered_gamma: bool


def layernorm_quantize(
    native: Native,
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
    rounding_seed: int | None = None,  # noqa: ARG001 - NVFP4's, which the composition casts
) -> tuple[QuantizedStorage, torch.Tensor, torch.Tensor]:
    """te_hal.ops.layernorm_quantize for per-tensor scaling."""
    mean = native.empty(input.shape[:-1], torch.float32, input.device)
    flags = CastFlags(dtype, mode, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2)
    norm = _Norm(codes.LAYERNORM, "layernorm_quantize", bias, mean, epsilon, zero_centered_gamma)
    storage, rstd = _normalise(native, norm, input, weight, scale, amax, flags)
    return storage, mean, rstd


def rmsnorm_quantize(
    native: Native,
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
    rounding_seed: int | None = None,  # noqa: ARG001 - NVFP4's, which the composition casts
) -> tuple[QuantizedStorage, torch.Tensor]:
    """te_hal.ops.rmsnorm_quantize for per-tensor scaling."""
    flags = CastFlags(dtype, mode, rowwise, columnwise, columnwise_order, amax_epsilon, power_of_2)
    norm = _Norm(codes.RMSNORM, "rmsnorm_quantize", None, None, epsilon, zero_centered_gamma)
    return _normalise(native, norm, input, weight, scale, amax, flags)


def _normalise(
    native: Native,
    norm: _Norm,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    flags: CastFlags,
) -> tuple[QuantizedStorage, torch.Tensor]:
    """The cast result, and rstd."""
    values, gamma = contiguous(input), contiguous(weight)
    beta = None if norm.bias is None else contiguous(norm.bias)
    rstd = native.empty(values.shape[:-1], torch.float32, values.device)
    rows, cols = rows_and_cols(values.shape)
    cast = FusedCast(native, norm.op, values, tuple(values.shape), scale, amax, flags)
    dtype = codes.DTYPES[values.dtype]
    workspace = native.workspace(
        values.device, _OP, rows=rows, cols=cols, kind=norm.kind, input_dtype=dtype, output_mode=cast.mode
    )
    status = native.lib.api_norm_quantize(
        native.library.api,
        norm.kind,
        address(values),
        dtype,
        rows,
        cols,
        address(gamma),
        codes.DTYPES[gamma.dtype],
        address(beta),
        codes.NO_DTYPE if beta is None else codes.DTYPES[beta.dtype],
        norm.epsilon,
        cast.flags | (codes.FLAG_ZERO_CENTERED_GAMMA if norm.zero_centered_gamma else 0),
        address(norm.mean),
        address(rstd),
        0,
        dtype,
        *cast.scaling(),
        *cast.results(),
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, norm.op)
    return cast.storage, rstd
