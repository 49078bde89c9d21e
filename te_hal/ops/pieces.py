"""Rows of a large tensor on a CPU, some at a time, so that what is computed in between stays in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: Elements of a piece. gelu of 2048x1536 took 10 ms in pieces and 26 whole, its backward 15 and 72; memory that is
#: touched for the first time, as fp32 results of that size are, costs another 5 ms each.
PIECE = 1 << 17
#: Rows of a piece are a multiple of this: what does not fill a vector torch computes another way, with other last bits.
#: So with one thread pieces give the bits of the whole. With several, torch cuts a tensor by their number as well, and
#: last bits belong to that number, with pieces and without.
_ROWS = 32


def in_one(tensor: torch.Tensor) -> bool:
    """Whether a tensor needs no pieces: it is small, or elsewhere, where each would be one more launch."""
    return tensor.device.type != "cpu" or tensor.numel() <= PIECE


def row_pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows of ``[M, K]`` in order; one where :func:`in_one`."""
    count, columns = rows.shape
    if in_one(rows):
        yield slice(0, count)
        return
    step = max(1, PIECE // (_ROWS * columns)) * _ROWS
    for start in range(0, count, step):
        yield slice(start, start + step)
