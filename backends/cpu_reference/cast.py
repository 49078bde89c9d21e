"""quantize and dequantize in plain torch (docs/numerics.md, rules C1-C6); scales per block: block_cast, nvfp4_cast."""

from __future__ import annotations

import torch

from te_hal.backends.cpu_reference.amax import accumulate, amax_of_extremes
from te_hal.backends.cpu_reference.block_cast import dequantize_blocks, quantize_blocks
from te_hal.backends.cpu_reference.chunks import as_rows, row_spans
from te_hal.backends.cpu_reference.decode import decode
from te_hal.backends.cpu_reference.encode import encode
from te_hal.backends.cpu_reference.nvfp4_cast import quantize_nvfp4
from te_hal.backends.cpu_reference.nvfp4_values import dequantize_nvfp4
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, code_format
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage, StorageKind


def quantize(
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
    """``round(clamp(float(input) * scale))``, the amax of the same values recorded on the way (C1-C4, A1).

    Both copies share one ``scale_inv`` (C5). In the other modes each block finds its own scale (B1 to B3, M1, M2; NV1
    to NV6).
    """
    if out is None:
        kind = StorageKind.of(code_format(dtype), mode, rowwise=rowwise, columnwise=columnwise, order=columnwise_order)
        out = QuantizedStorage.empty(kind, tuple(input.shape), input.dtype, input.device)
    dense = all(tensor is None or tensor.is_contiguous() for tensor in out.tensors())
    target = out if dense else QuantizedStorage.empty(out.kind, out.shape, out.dtype, out.device)
    if out.mode in NVFP4_MODES:
        quantize_nvfp4(input, target, rounding_seed)
    elif out.mode is not ScalingMode.TENSOR:
        quantize_blocks(input, target, epsilon=amax_epsilon, power_of_2=power_of_2)
    else:
        _quantize_tensor(input, scale, amax, target)
    for given, made in zip(out.tensors(), target.tensors(), strict=True):
        if given is not None and made is not None and given is not made:
            given.copy_(made)
    return out


def _quantize_tensor(
    input: torch.Tensor, scale: torch.Tensor | None, amax: torch.Tensor | None, out: QuantizedStorage
) -> None:
    """Fill a storage with one scale per tensor, whose buffers are contiguous."""
    if scale is None:
        raise ArgumentError("quantize: scale", got="None", accepted="an fp32 tensor", todo="compute_scale gives one")
    scale = scale.view(1)
    scale_inv = torch.ones_like(scale) / scale
    extremes = _cast_rows(input.detach(), scale, out, record=amax is not None)
    if amax is not None:
        accumulate(amax, amax_of_extremes(extremes, input.detach()))
    for target in (out.rowwise_scale_inv, out.columnwise_scale_inv):
        if target is not None:
            target.copy_(scale_inv)


def _cast_rows(
    input: torch.Tensor, scale: torch.Tensor, out: QuantizedStorage, *, record: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fill the copies of ``out`` piece by piece; with ``record`` return each piece's (min, max)."""
    rows = as_rows(input)
    same_order, transposed = _copies(out, rows.shape)
    extremes: list[tuple[torch.Tensor, torch.Tensor]] = []
    buffer = torch.empty(0, dtype=torch.float32, device=input.device)
    for span in row_spans(rows):
        piece = rows[span]
        values = buffer.resize_(piece.shape).copy_(piece)
        if record:
            extremes.append(torch.aminmax(values))
        codes = encode(values.mul_(scale), out.format, same_order[0][span] if same_order else None)
        for copy in same_order[1:]:
            copy[span] = codes
        if transposed is not None:
            transposed[:, span] = codes.t().contiguous()  # a third faster than a strided write of strided bytes
    return extremes


def _copies(out: QuantizedStorage, shape: torch.Size) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The copies of ``out`` in input's order as ``[rows, K]``, and the transposed one as ``[K, rows]``."""
    same_order = [] if out.rowwise_data is None else [out.rowwise_data.view(shape)]
    if out.columnwise_data is None:
        return same_order, None
    # A single row or column lies in memory alike either way.
    if out.columnwise_order == ColumnwiseOrder.TRANSPOSED and min(shape) > 1:
        return same_order, out.columnwise_data.view(shape[::-1])
    return [*same_order, out.columnwise_data.view(shape)], None


def dequantize(input: QuantizedStorage, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``decode(code) * scale_inv`` in fp32, rounded once to the result's dtype (C6, B4, M3, NV7).

    The rowwise copy is read, else the columnwise one.
    """
    if input.mode in NVFP4_MODES:
        return dequantize_nvfp4(input, out_dtype or input.dtype)
    if input.mode is not ScalingMode.TENSOR:
        return dequantize_blocks(input, out_dtype or input.dtype)
    codes, scale_inv, transposed = input.copy_to_read()
    if transposed:
        codes = codes.movedim(0, -1).contiguous()
    output = torch.empty(input.shape, dtype=out_dtype or input.dtype, device=input.device)
    rows, values = as_rows(codes), as_rows(output)
    for span in row_spans(rows):
        values[span] = decode(rows[span], input.format, torch.float32).mul_(scale_inv)
    return output
