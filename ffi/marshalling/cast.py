"""quantize and dequantize through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import NOTHING_TO_READ, address, check_writable, contiguous, rows_and_cols
from te_hal.ffi.marshalling.block_cast import dequantize_blocks, quantize_blocks
from te_hal.ffi.marshalling.nvfp4_cast import dequantize_nvfp4, quantize_nvfp4
from te_hal.ffi.marshalling.result_storage import kind_of
from te_hal.schema.errors import StateError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_hal.ffi.native import Native

_DTYPES = codes.DTYPES
_ORDERS = codes.ORDERS


def quantize(
    native: Native,
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    out: QuantizedStorage | None = None,
    dtype: torch.dtype,
    mode: ScalingMode = ScalingMode.TENSOR,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rounding_seed: int | None = None,
) -> QuantizedStorage:
    """te_hal.ops.quantize. With per-tensor scaling both copies share one ``scale_inv``."""
    if scale is None:
        kind = kind_of(dtype, mode, rowwise, columnwise, columnwise_order)
        if kind.mode in NVFP4_MODES:
            return quantize_nvfp4(native, input, kind, out, seed=rounding_seed)
        return quantize_blocks(native, input, kind, out, epsilon=amax_epsilon, power_of_2=power_of_2)
    values = input if input.is_contiguous() else contiguous(input)
    if out is None:
        kind = kind_of(dtype, mode, rowwise, columnwise, columnwise_order)
        target = QuantizedStorage.empty(kind, tuple(values.shape), values.dtype, values.device, native.empty)
        _cast(native, values, scale, amax, target)
        return target
    target = dense_target(out)
    _cast(native, values, scale, amax, target)
    if target is not out:
        copy_back(out, target)
    return out


def _cast(
    native: Native, values: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor | None, target: QuantizedStorage
) -> None:
    """The native call. Written out, as every function called here would cost a tenth of it."""
    if amax is not None and amax.requires_grad:
        check_writable(native, "quantize", "amax", amax)
    shape = target.shape
    rows, cols = shape if len(shape) == 2 else rows_and_cols(shape)  # noqa: PLR2004 - the usual case
    row, row_scale_inv = target.rowwise_data, target.rowwise_scale_inv
    col, col_scale_inv = target.columnwise_data, target.columnwise_scale_inv
    kind = target.kind
    status = native.lib.api_quantize(
        native.library.api,
        values.data_ptr() or NOTHING_TO_READ,
        _DTYPES[values.dtype],
        rows,
        cols,
        scale.data_ptr(),
        0 if amax is None else amax.data_ptr(),
        0 if row is None else row.data_ptr() or NOTHING_TO_READ,
        0 if col is None else col.data_ptr() or NOTHING_TO_READ,
        _ORDERS[kind.order],
        0 if row_scale_inv is None else row_scale_inv.data_ptr(),
        0 if col_scale_inv is None else col_scale_inv.data_ptr(),
        _DTYPES[kind.format.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "quantize")


def dense_target(out: QuantizedStorage) -> QuantizedStorage:
    """``out`` where its buffers are contiguous, else a storage like it whose buffers are."""
    tensors = out.tensors()
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            break
    else:
        return out
    return out.with_tensors(
        tuple(None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors)
    )


def copy_back(out: QuantizedStorage, made: QuantizedStorage) -> None:
    """Fill ``out`` from the storage that stood in for it."""
    for target, source in zip(out.tensors(), made.tensors(), strict=True):
        if target is not None and source is not None:
            target.copy_(source)


def dequantize(native: Native, input: QuantizedStorage, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """te_hal.ops.dequantize. The rowwise copy is read where there is one."""
    if input.mode in NVFP4_MODES:
        return dequantize_nvfp4(native, input, out_dtype or input.dtype)
    if input.mode is not ScalingMode.TENSOR:
        return dequantize_blocks(native, input, out_dtype or input.dtype)
    data, copy, scale_inv = copy_to_read(native, input)
    output = native.empty(input.shape, out_dtype or input.dtype, input.device)
    rows, cols = rows_and_cols(input.shape)
    status = native.lib.api_dequantize(
        native.library.api,
        address(data),
        _DTYPES[input.format.dtype],
        rows,
        cols,
        copy,
        codes.MODES[input.mode],
        scale_inv.data_ptr(),
        0,
        0,
        address(output),
        _DTYPES[output.dtype],
        native.stream(input.device),
    )
    if status:
        native.check(status, "dequantize")
    return output


def copy_to_read(native: Native, storage: QuantizedStorage) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Codes, te_hal_copy and scale_inv of the rowwise copy where there is one, else of the columnwise one."""
    data, scale_inv, copy = storage.rowwise_data, storage.rowwise_scale_inv, codes.COPY_ROWWISE
    if data is None:
        data, scale_inv = storage.columnwise_data, storage.columnwise_scale_inv
        copy = codes.COPIES[storage.columnwise_order]
    if data is None or scale_inv is None:
        raise StateError(
            f"backend {native.backend}",
            got=f"{storage!r} without codes or scale_inv",
            accepted="both",
            todo="quantize it again",
        )
    return contiguous(data), copy, contiguous(scale_inv)
