"""Walks tensors by blocks without a loop over them: tiles that stay in the cache, and in each up to four strided views.

A tile's blocks are all of one size but for those at its far edges. So a view of the whole ones, ``[blocks down, rows of
a block, blocks along, columns of a block]``, and one for each edge that is there, cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.chunks import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.schema.block_scales import Block

    Place = tuple[slice, slice]

#: Tiles begin at multiples of the largest block's side, which is a multiple of every other's.
_SIDE = 128


#: Fewest elements of a tile: below, every pass costs more to start than to run.
_LEAST = 1 << 16


def tiles(rows: int, cols: int, *, most: int | None = None, share: int = 4) -> Iterator[Place]:
    """Rows and columns of tiles whose near edges are edges of blocks; none if it is empty.

    Args:
        rows: of the tensor.
        cols: of the tensor.
        most: elements of a tile, about; None: CHUNK.
        share: no more than this part of the tensor either, so that buffers are small beside it. 1024x1024 elements are
            quantized in two thirds of the time by quarters, which stay in the cache.
    """
    if rows == 0 or cols == 0:
        return
    elements = min(CHUNK, most or CHUNK, max(_LEAST, rows * cols // share))
    height = max(_SIDE, elements // cols // _SIDE * _SIDE)
    width = max(_SIDE, elements // min(rows, height) // _SIDE * _SIDE)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, cols))


def grid_place(place: Place, block: Block) -> Place:
    """Where the blocks of a tile lie in the grid of the whole tensor."""
    return (
        slice(place[0].start // block.down, -(-place[0].stop // block.down)),
        slice(place[1].start // block.along, -(-place[1].stop // block.along)),
    )


def by_block(values: torch.Tensor, block: Block) -> Iterator[tuple[torch.Tensor, Place]]:
    """Views ``[blocks down, rows, blocks along, columns]`` of ``[rows, cols]``, each with its place in the grid."""
    for rows, down, heights in _runs(values.shape[0], block.down):
        for cols, along, widths in _runs(values.shape[1], block.along):
            part = values[rows, cols]
            yield part.unflatten(0, heights).unflatten(2, widths), (down, along)  # type: ignore[no-untyped-call]


def _runs(size: int, length: int) -> list[tuple[slice, slice, tuple[int, int]]]:
    """Runs of equally long blocks along one side: elements, blocks, and (number, length) of them."""
    whole, rest = divmod(size, length)
    runs = [(slice(0, whole * length), slice(0, whole), (whole, length))] if whole else []
    return [*runs, (slice(size - rest, size), slice(whole, whole + 1), (1, rest))] if rest else runs


def amax_by_block(values: torch.Tensor, block: Block, magnitudes: torch.Tensor) -> torch.Tensor:
    """Amax of each block of fp32 ``values``, its NaN elements ignored (A1): the grid of a tile.

    ``magnitudes`` is ``values.abs()``. A NaN passes through it: it serves as the sign that there is one.
    """
    grid = _largest_by_block(magnitudes, block)
    if grid.isnan().any():
        return _largest_by_block(magnitudes.masked_fill(values.isnan(), 0.0), block)
    return grid


def _largest_by_block(magnitudes: torch.Tensor, block: Block) -> torch.Tensor:
    grid = magnitudes.new_empty(block.grid(*magnitudes.shape))
    for view, place in by_block(magnitudes, block):
        along = view.amax(3) if block.along > 1 else view.squeeze(3)  # a reduction over one element costs a pass
        grid[place] = along.amax(1) if block.down > 1 else along.squeeze(1)
    return grid


def multiply_by_block(
    values: torch.Tensor, grid: torch.Tensor, block: Block, out: torch.Tensor, *, divides: bool = False
) -> torch.Tensor:
    """``out = values * (the factor of each element's block)``, or divided by it; ``out`` may be ``values``."""
    apply = torch.div if divides else torch.mul
    for (view, (down, along)), (target, _) in zip(by_block(values, block), by_block(out, block), strict=True):
        apply(view, grid[down, along][:, None, :, None], out=target)
    return out
