"""MXFP8 with one scale per 32x32 elements (docs/numerics.md, M4): composed, as no op casts to such blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import te_hal.ops
from te_hal.schema.block_scales import block_copy, rows_and_cols
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from te_hal.schema.formats import ColumnwiseOrder, ElementFormat
    from te_hal.schema.storage import QuantizedStorage

_SIDE = 32
_BIAS = 127


def quantize_squares(
    tensor: torch.Tensor,
    format: ElementFormat,
    *,
    rowwise: bool,
    columnwise: bool,
    order: ColumnwiseOrder,
    out: QuantizedStorage | None,
) -> QuantizedStorage:
    """A storage in mode ``mxfp8`` in which the 32 rows (or columns) of a square repeat its scale; exact.

    The casts of two tensors give its parts: scales are those of a tensor that holds each square's amax throughout,
    codes those of ``tensor * 2**(127 - e)`` under a scale of 1. Needs a few fp32 copies of the tensor at a time.

    Args:
        tensor: any shape; fp32, fp16 or bf16.
        format: of the codes.
        rowwise: make the rowwise copy.
        columnwise: make the columnwise copy.
        order: memory order of the columnwise copy.
        out: storage to refill in place; None: a new one.
    """
    rows, cols = rows_and_cols(tuple(tensor.shape))
    values = tensor.detach().reshape(rows, cols).float()
    amax = _spread(_square_amax(values), rows, cols)
    settings: dict[str, Any] = {
        "dtype": format.dtype,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "columnwise_order": order,
    }
    made = te_hal.ops.quantize(amax.reshape(tensor.shape), out=out, mode=ScalingMode.MXFP8, **settings)
    grid = block_copy(made, rowwise=rowwise).grid
    codes = grid.repeat_interleave(_SIDE, 1)[:, :cols] if rowwise else grid.repeat_interleave(_SIDE, 0)[:rows]
    scaled = torch.ldexp(values, _BIAS - codes.to(torch.int32)).reshape(tensor.shape)
    cast = te_hal.ops.quantize(scaled, torch.ones(1, device=tensor.device), **settings)
    for target, source in ((made.rowwise_data, cast.rowwise_data), (made.columnwise_data, cast.columnwise_data)):
        if target is not None and source is not None:
            target.copy_(source)
    return made if out is not None else made.with_tensors(made.tensors(), tensor.dtype)


def _square_amax(values: torch.Tensor) -> torch.Tensor:
    """The grid of amaxes of the squares of ``[rows, cols]``, NaN left out; those at the edges are smaller."""
    rows, cols = values.shape
    magnitudes = torch.where(values.isnan(), 0.0, values.abs())
    padded = torch.nn.functional.pad(magnitudes, (0, -cols % _SIDE, 0, -rows % _SIDE))
    return padded.view(padded.shape[0] // _SIDE, _SIDE, padded.shape[1] // _SIDE, _SIDE).amax((1, 3))


def _spread(grid: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """``[rows, cols]`` in which every element has the value of its square."""
    return grid.repeat_interleave(_SIDE, 0)[:rows].repeat_interleave(_SIDE, 1)[:, :cols].contiguous()
