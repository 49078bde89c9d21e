"""quantize and dequantize in plain torch (docs/numerics.md, rules C1-C6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.amax import accumulate, extremes_to_amax
from te_hal.backends.cpu_reference.chunks import as_rows, row_spans
from te_hal.backends.cpu_reference.decode import decode
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, element_format
from te_hal.schema.storage import QuantizedStorage

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
) -> QuantizedStorage:
    """Cast to FP8: ``round(clamp(float(input) * scale))``, the amax of the same values recorded on the way.

    Args:
        input: fp32, fp16 or bf16, any shape and strides.
        scale: fp32, one element.
        amax: fp32, one element; becomes ``max(amax, max|input|)`` in place (A1).
        out: storage to refill in place, with the copies asked for.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        mode: "tensor"; the capability answer refuses the others.
        rowwise: make the copy of input's shape.
        columnwise: make the copy for gemms that contract over rows.
        columnwise_order: "transposed" stores that copy as ``[K, ...]``, "same" like the rowwise one.

    Returns:
        ``out`` where given, else a new storage; both copies share one ``scale_inv`` of shape ``[1]`` (C5).
    """
    if out is None:
        out = _empty_storage(input, element_format(dtype), mode, rowwise, columnwise, columnwise_order)
    assert scale is not None  # noqa: S101 - the schema's rule, for the type checker
    scale = scale.view(1)
    scale_inv = torch.ones_like(scale) / scale
    extremes = _cast_rows(input, scale, out, record=amax is not None)
    if amax is not None and extremes:
        accumulate(amax, extremes_to_amax(extremes, input))
    for target in (out.rowwise_scale_inv, out.columnwise_scale_inv):
        if target is not None:
            target.copy_(scale_inv)
    return out


def _empty_storage(
    input: torch.Tensor,
    format: ElementFormat,
    mode: ScalingMode,
    rowwise: bool,
    columnwise: bool,
    order: ColumnwiseOrder,
) -> QuantizedStorage:
    shape = tuple(input.shape)
    transposed = shape[-1:] + shape[:-1] if order == ColumnwiseOrder.TRANSPOSED else shape
    scale_inv = torch.empty(1, dtype=torch.float32, device=input.device)
    return QuantizedStorage(
        format=format,
        mode=ScalingMode(mode),
        shape=shape,
        dtype=input.dtype,
        rowwise_data=torch.empty(shape, dtype=torch.uint8, device=input.device) if rowwise else None,
        rowwise_scale_inv=scale_inv if rowwise else None,
        columnwise_data=torch.empty(transposed, dtype=torch.uint8, device=input.device) if columnwise else None,
        columnwise_scale_inv=scale_inv if columnwise else None,
        columnwise_order=ColumnwiseOrder(order),
    )


def _cast_rows(
    input: torch.Tensor, scale: torch.Tensor, out: QuantizedStorage, *, record: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Fill the copies of ``out`` piece by piece; with ``record`` return each piece's (min, max)."""
    rows = as_rows(input)
    writers = _copies(out, rows.shape)
    extremes: list[tuple[torch.Tensor, torch.Tensor]] = []
    values = codes = None
    for span in row_spans(rows):
        piece = rows[span]
        if values is None or values.shape != piece.shape:
            values = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
            codes = torch.empty(piece.shape, dtype=torch.uint8, device=piece.device)
        values.copy_(piece)
        if record:
            extremes.append(torch.aminmax(values))
        encode(values.mul_(scale), out.format, codes)
        for copy in writers:
            copy[span].copy_(codes)
    return extremes


def _copies(out: QuantizedStorage, shape: torch.Size) -> list[torch.Tensor]:
    copies = []
    if out.rowwise_data is not None:
        copies.append(out.rowwise_data.view(shape))
    if out.columnwise_data is not None:
        transposed = out.columnwise_order == ColumnwiseOrder.TRANSPOSED
        copies.append(out.columnwise_data.view(shape[::-1]).t() if transposed else out.columnwise_data.view(shape))
    return copies


def encode(values: torch.Tensor, format: ElementFormat, codes: torch.Tensor) -> None:
    """Clamp fp32 ``values`` in place and write their nearest codes, ties to even (C1-C4).

    Clamping comes first because torch's own conversion gives NaN, infinity or the largest code beyond the range,
    by format and version. After it all is finite or NaN, so the sum is NaN exactly if an element is.
    """
    values.clamp_(-format.max, format.max)
    codes.view(format.dtype).copy_(values)
    if values.sum().isnan():
        codes.masked_fill_(values.isnan(), _NAN_CODE)


def dequantize(input: QuantizedStorage, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``decode(code) * scale_inv`` in fp32, rounded once to the result's dtype (C6).

    Args:
        input: storage; its rowwise copy is read, else its columnwise one.
        out_dtype: fp32, fp16 or bf16; None: the storage's nominal dtype.

    Returns:
        A new contiguous tensor of the storage's shape.
    """
    codes, scale_inv = input.rowwise_data, input.rowwise_scale_inv
    if codes is None:
        assert input.columnwise_data is not None  # noqa: S101 - a storage has at least one copy
        codes, scale_inv = input.columnwise_data, input.columnwise_scale_inv
        if input.columnwise_order == ColumnwiseOrder.TRANSPOSED and codes.dim() > 1:
            codes = codes.movedim(0, -1).contiguous()
    assert scale_inv is not None  # noqa: S101 - every copy has its factor
    output = torch.empty(input.shape, dtype=out_dtype or input.dtype, device=input.device)
    rows, values = as_rows(codes), as_rows(output)
    for span in row_spans(rows):
        values[span] = decode(rows[span], input.format, torch.float32).mul_(scale_inv)
    return output
