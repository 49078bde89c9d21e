"""quantize and dequantize in NVFP4 through a kernel library, and operands as it takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols, scratch
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.nvfp4_layout import AMAX_BYTES, AMAX_OF_ONE, tensor_amax
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.storage import StorageKind

    Spare = tuple[torch.Tensor, torch.Tensor]

_OP_QUANTIZE = codes.OPS["quantize"]
_HALF = 32


class GivenCodes(NamedTuple):
    """One copy as entries take it; both tensors stay alive until the call.

    Attributes:
        data: packed codes, contiguous.
        copy: te_hal_copy.
        scale_inv: E4M3 codes and the amax, contiguous, at a multiple of 4 bytes.
    """

    data: torch.Tensor
    copy: int
    scale_inv: torch.Tensor


def given_codes(storage: QuantizedStorage, *, rowwise: bool) -> GivenCodes:
    """That copy of a storage in NVFP4; the other one where it is the only one there is."""
    kind = storage.kind
    rowwise = kind.rowwise if rowwise else not kind.columnwise
    row, row_scale_inv, column, column_scale_inv = storage.tensors()
    data, scale_inv = (row, row_scale_inv) if rowwise else (column, column_scale_inv)
    code = codes.COPY_ROWWISE if rowwise else codes.COPIES[ColumnwiseOrder.TRANSPOSED]
    return GivenCodes(contiguous(data), code, _aligned(scale_inv))  # type: ignore[arg-type] # there is a copy


def _aligned(scale_inv: torch.Tensor) -> torch.Tensor:
    """The buffer, or a copy of it, where its amax lies as fp32 does."""
    fits = scale_inv.is_contiguous() and scale_inv.data_ptr() % AMAX_BYTES == 0
    return scale_inv if fits else scale_inv.clone(memory_format=torch.contiguous_format)


def quantize_nvfp4(
    native: Native, input: torch.Tensor, kind: StorageKind, out: QuantizedStorage | None, *, seed: int | None
) -> QuantizedStorage:
    """te_hal.ops.quantize in the modes of NVFP4: two launches, three with Hadamard's transform; no amax comes back.

    Padding of scales is not touched.
    """
    values = contiguous(input)
    target = out
    if target is None:
        target = QuantizedStorage.empty(kind, tuple(values.shape), values.dtype, values.device, native.empty)
    spares: list[Spare] = []
    row, row_scale_inv, column, column_scale_inv = target.tensors()
    arguments = [
        *_written(row, row_scale_inv, spares),
        *_written(column, column_scale_inv, spares),
    ]
    dtype, mode = codes.DTYPES[values.dtype], codes.MODES[kind.mode]
    rows, cols = rows_and_cols(target.shape)
    workspace = native.workspace(values.device, _OP_QUANTIZE, rows=rows, cols=cols, input_dtype=dtype, output_mode=mode)
    status = native.lib.api_quantize_nvfp4(
        native.library.api,
        address(values),
        dtype,
        rows,
        cols,
        mode,
        0 if seed is None else codes.FLAG_BY_CHANCE,
        0 if seed is None else seed & 0xFFFFFFFF,
        0 if seed is None else seed >> _HALF,
        *(address(tensor) for tensor in arguments),
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, "quantize")
    for written, spare in spares:
        written.copy_(spare)
    return target


def _written(
    data: torch.Tensor | None, scale_inv: torch.Tensor | None, spares: list[Spare]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What stands for both buffers of a copy in the call; a buffer that cannot be written at once has a spare."""
    if data is None or scale_inv is None:
        return None, None
    codes_ = data if data.is_contiguous() else torch.empty_like(data, memory_format=torch.contiguous_format)
    scales = _aligned(scale_inv)  # a copy has the padding, which comes back unchanged
    spares += [pair for pair in ((data, codes_), (scale_inv, scales)) if pair[0] is not pair[1]]
    return codes_, scales


def dequantize_nvfp4(
    native: Native, storage: QuantizedStorage, dtype: torch.dtype, *, rowwise: bool = True, unscaled: bool = False
) -> torch.Tensor:
    """The values of that copy of a storage in NVFP4, or of the only one, in ``dtype``.

    Args:
        native: the library.
        storage: what to decode.
        dtype: of the result.
        rowwise: which copy is read, where there are both.
        unscaled: code times block scale alone, exact in every dtype; what is transformed stays so (NV8).
    """
    given = given_codes(storage, rowwise=rowwise)
    output = native.empty(storage.shape, dtype, storage.device)
    status = native.lib.api_dequantize_nvfp4(
        native.library.api,
        address(given.data),
        *rows_and_cols(storage.shape),
        given.copy,
        codes.MODES[storage.mode],
        address(given.scale_inv),
        codes.FLAG_UNSCALED if unscaled else 0,
        address(output),
        codes.DTYPES[dtype],
        native.stream(storage.device),
    )
    if status:
        native.check(status, "dequantize")
    return output


def unscaled_operand(native: Native, storage: QuantizedStorage, *, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a product's operand in bf16, which holds them exactly, and the fp32 factor ``[1]`` they lack (NV8)."""
    values = dequantize_nvfp4(native, storage, torch.bfloat16, rowwise=rowwise, unscaled=True)
    return values, tensor_amax(given_codes(storage, rowwise=rowwise).scale_inv) * (1 / AMAX_OF_ONE)
