"""quantize_current and bias_grad_quantize through a kernel library.

The native calls are written out: a linear layer makes up to three of them per step, and every function called on the
way would cost a tenth of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.ffi import codes
from te_hal.ffi.marshal import NOTHING_TO_READ, address, check_writable, contiguous, rows_and_cols, scratch
from te_hal.ffi.marshalling.cast import copy_back, dense_target
from te_hal.ffi.marshalling.result_storage import kind_of
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native

_DTYPES = codes.DTYPES
_ORDERS = codes.ORDERS
_OP_QUANTIZE = codes.OPS["quantize"]
_OP_BIAS_GRAD_QUANTIZE = codes.OPS["bias_grad_quantize"]
_GIVEN, _OWN = codes.MODES[ScalingMode.TENSOR], codes.MODE_TENSOR_CURRENT


def quantize_current(
    native: Native,
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
    """te_hal.ops.quantize_current: two launches; scale and amax never leave the device."""
    values = input if input.is_contiguous() else contiguous(input)
    if out is None:
        kind = kind_of(dtype, ScalingMode.TENSOR, rowwise, columnwise, columnwise_order)
        target = QuantizedStorage.empty(kind, tuple(values.shape), values.dtype, values.device, native.empty)
    else:
        target = dense_target(out)
    _cast_by_own_amax(native, values, target, amax_epsilon, power_of_2)
    if out is None or target is out:
        return target
    copy_back(out, target)
    return out


def _cast_by_own_amax(
    native: Native, values: torch.Tensor, target: QuantizedStorage, epsilon: float, power_of_2: bool
) -> None:
    shape, device = target.shape, values.device
    rows, cols = shape if len(shape) == 2 else rows_and_cols(shape)  # noqa: PLR2004 - the usual case
    row, row_scale_inv = target.rowwise_data, target.rowwise_scale_inv
    col, col_scale_inv = target.columnwise_data, target.columnwise_scale_inv
    kind, dtype = target.kind, _DTYPES[values.dtype]
    workspace = native.workspace(device, _OP_QUANTIZE, rows=rows, cols=cols, input_dtype=dtype, output_mode=_OWN)
    status = native.lib.api_quantize_current(
        native.library.api,
        values.data_ptr() or NOTHING_TO_READ,
        dtype,
        rows,
        cols,
        0,
        0,
        epsilon,
        codes.FLAG_POWER_OF_2 if power_of_2 else 0,
        0 if row is None else row.data_ptr() or NOTHING_TO_READ,
        0 if col is None else col.data_ptr() or NOTHING_TO_READ,
        _ORDERS[kind.order],
        0 if row_scale_inv is None else row_scale_inv.data_ptr(),
        0 if col_scale_inv is None else col_scale_inv.data_ptr(),
        _DTYPES[kind.format.dtype],
        *scratch(workspace),
        native.stream(device),
    )
    if status:
        native.check(status, "quantize_current")


def bias_grad_quantize(
    native: Native,
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
    rounding_seed: int | None = None,  # noqa: ARG001 - NVFP4's, which the composition casts
) -> tuple[QuantizedStorage, torch.Tensor]:
    """te_hal.ops.bias_grad_quantize for per-tensor scaling; the gradient is read once where the scale is given."""
    if amax is not None and amax.requires_grad:
        check_writable(native, "bias_grad_quantize", "amax", amax)
    values = grad_output if grad_output.is_contiguous() else contiguous(grad_output)
    rows, cols = values.shape
    device = values.device
    kind = kind_of(dtype, mode, rowwise, columnwise, columnwise_order)
    target = QuantizedStorage.empty(kind, (rows, cols), values.dtype, device, native.empty)
    grad_bias = native.empty((cols,), values.dtype, device)
    code, own = _DTYPES[values.dtype], _GIVEN if scale is not None else _OWN
    row, row_scale_inv, col, col_scale_inv = target.tensors()
    workspace = native.workspace(
        device, _OP_BIAS_GRAD_QUANTIZE, rows=rows, cols=cols, input_dtype=code, output_mode=own
    )
    status = native.lib.api_bias_grad_quantize(
        native.library.api,
        values.data_ptr() or NOTHING_TO_READ,
        code,
        rows,
        cols,
        grad_bias.data_ptr() or NOTHING_TO_READ,
        code,
        own,
        0 if scale is None else scale.data_ptr(),
        0 if amax is None else amax.data_ptr(),
        amax_epsilon,
        codes.FLAG_POWER_OF_2 if power_of_2 else 0,
        address(row),
        address(col),
        _ORDERS[kind.order],
        address(row_scale_inv),
        address(col_scale_inv),
        _DTYPES[kind.format.dtype],
        *scratch(workspace),
        native.stream(device),
    )
    if status:
        native.check(status, "bias_grad_quantize")
    return target, grad_bias
