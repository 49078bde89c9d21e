"""quantize and dequantize with a scale per block in plain torch (docs/numerics.md, B1 to B4, M1 to M3, T1 to T3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.backends.cpu_reference import blocks
from te_hal.backends.cpu_reference.block_scale import e8m0_scales, factors, float_scales, mtfp8_scales
from te_hal.backends.cpu_reference.decode import decode
from te_hal.backends.cpu_reference.encode import encode
from te_hal.schema.block_scales import MTFP8_MODES, block_copy, rows_and_cols
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from te_hal.backends.cpu_reference.block_scale import BlockScales
    from te_hal.backends.cpu_reference.blocks import Place
    from te_hal.schema.block_scales import BlockCopy
    from te_hal.schema.storage import QuantizedStorage


class _Rule(NamedTuple):
    """How a block's amax becomes its scale."""

    out: QuantizedStorage
    input_dtype: torch.dtype
    epsilon: float
    power_of_2: bool

    def scales(self, amax: torch.Tensor) -> BlockScales:
        if self.out.mode is ScalingMode.MXFP8:
            return e8m0_scales(amax, self.out.format)
        if self.out.mode in MTFP8_MODES:
            return mtfp8_scales(amax, self.out.format)
        return float_scales(amax, self.out.format, self.input_dtype, epsilon=self.epsilon, power_of_2=self.power_of_2)


def quantize_blocks(input: torch.Tensor, out: QuantizedStorage, *, epsilon: float, power_of_2: bool) -> None:
    """Fill the copies of ``out`` with the codes and scales of ``input``, tile by tile (B1 to B3, M1, M2).

    Every copy is cast from the input itself. With 128x128 blocks both hold the same, which is computed once.
    """
    rule = _Rule(out, input.dtype, epsilon, power_of_2)
    rows, cols = rows_and_cols(out.shape)
    given = input.detach().reshape(rows, cols)
    held = ((True, out.kind.rowwise), (False, out.kind.columnwise))
    copies = [_flat(block_copy(out, rowwise=rowwise), rows, cols) for rowwise, there in held if there]
    values, magnitudes, scaled = (torch.empty(0, dtype=torch.float32, device=input.device) for _ in range(3))
    for place in blocks.tiles(rows, cols):
        piece = given[place]
        values.resize_(piece.shape).copy_(piece)
        torch.abs(values, out=magnitudes.resize_(piece.shape))
        made: dict[object, tuple[torch.Tensor, BlockScales]] = {}
        for copy in copies:
            if copy.block not in made:
                found = rule.scales(blocks.amax_by_block(values, copy.block, magnitudes))
                factor, divides = (found.scale_inv, True) if found.scale is None else (found.scale, False)
                blocks.multiply_by_block(values, factor, copy.block, scaled.resize_(piece.shape), divides=divides)
                made[copy.block] = encode(scaled, out.format, _contiguous_codes(copy, place)), found
            codes, found = made[copy.block]
            _place_codes(copy, place, codes)
            copy.grid[blocks.grid_place(place, copy.block)] = found.scale_inv


def _flat(copy: BlockCopy, rows: int, cols: int) -> BlockCopy:
    """The copy with its codes as ``[rows, cols]``, or ``[cols, rows]`` where they are turned."""
    return copy._replace(codes=copy.codes.reshape((cols, rows) if copy.turned else (rows, cols)))


def _contiguous_codes(copy: BlockCopy, place: Place) -> torch.Tensor | None:
    """Where a tile's codes can be written at once; None if they lie transposed or with gaps."""
    target = None if copy.turned else copy.codes[place]
    return target if target is not None and target.is_contiguous() else None


def _place_codes(copy: BlockCopy, place: Place, codes: torch.Tensor) -> None:
    target = copy.codes[place[::-1]] if copy.turned else copy.codes[place]
    if target.data_ptr() != codes.data_ptr():
        target.copy_(codes.t().contiguous() if copy.turned else codes)


def dequantize_blocks(
    storage: QuantizedStorage, dtype: torch.dtype, *, rowwise: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``decode(code) * factor`` in fp32, rounded once to ``dtype`` (B4, M3).

    Args:
        storage: with blocks.
        dtype: of the result.
        rowwise: which copy is read, where there are both.
        out: contiguous, of the storage's shape, to be overwritten; None: a new tensor.
    """
    rows, cols = rows_and_cols(storage.shape)
    copy = _flat(block_copy(storage, rowwise=rowwise), rows, cols)
    result = torch.empty(storage.shape, dtype=dtype, device=storage.device) if out is None else out
    target = result.view(rows, cols)
    grid = factors(copy.grid)
    for place in blocks.tiles(rows, cols):
        codes = copy.codes[place[::-1]].t() if copy.turned else copy.codes[place]
        values = decode(codes.contiguous(), storage.format, torch.float32)
        target[place] = blocks.multiply_by_block(values, grid[blocks.grid_place(place, copy.block)], copy.block, values)
    return result
