"""quantize and dequantize in plain torch (docs/numerics.md, rules C1-C6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.amax import accumulate, amax_of_extremes
from te_hal.backends.cpu_reference.chunks import as_rows, row_spans
from te_hal.backends.cpu_reference.decode import decode
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, element_format
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat

_NAN_CODE = 0x7F


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
) -> QuantizedStorage:
    """``round(clamp(float(input) * scale))``, the amax of the same values recorded on the way (C1-C4, A1).

    Both copies share one ``scale_inv`` (C5).
    """
    if scale is None:
        raise ArgumentError("quantize: scale", got="None", accepted="an fp32 tensor", todo="compute_scale gives one")
    if out is None:
        kind = StorageKind.of(
            element_format(dtype), mode, rowwise=rowwise, columnwise=columnwise, order=columnwise_order
        )
        out = QuantizedStorage.empty(kind, tuple(input.shape), input.dtype, input.device)
    scale = scale.view(1)
    scale_inv = torch.ones_like(scale) / scale
    extremes = _cast_rows(input.detach(), scale, out, record=amax is not None)
    if amax is not None:
        accumulate(amax, amax_of_extremes(extremes, input.detach()))
    for target in (out.rowwise_scale_inv, out.columnwise_scale_inv):
        if target is not None:
            target.copy_(scale_inv)
    return out


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


def encode(values: torch.Tensor, format: ElementFormat, codes: torch.Tensor | None = None) -> torch.Tensor:
    """Clamp fp32 ``values`` in place and round them to the nearest codes, ties to even (C1-C4).

    Clamping comes first because torch's own conversion gives NaN, infinity or the largest code beyond the range,
    by format and version. After it all is finite or NaN, so the sum is NaN exactly if an element is.

    Args:
        values: fp32, already scaled; overwritten.
        format: E4M3 or E5M2.
        codes: contiguous uint8 of the same shape to write to; None: a new tensor.
    """
    if codes is None:
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    codes.view(format.dtype).copy_(values.clamp_(-format.max, format.max))
    if values.sum().isnan():
        codes.masked_fill_(values.isnan(), _NAN_CODE)
    return codes


def dequantize(input: QuantizedStorage, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``decode(code) * scale_inv`` in fp32, rounded once to the result's dtype (C6).

    The rowwise copy is read, else the columnwise one.
    """
    codes, scale_inv, transposed = input.copy_to_read()
    if transposed:
        codes = codes.movedim(0, -1).contiguous()
    output = torch.empty(input.shape, dtype=out_dtype or input.dtype, device=input.device)
    rows, values = as_rows(codes), as_rows(output)
    for span in row_spans(rows):
        values[span] = decode(rows[span], input.format, torch.float32).mul_(scale_inv)
    return output
