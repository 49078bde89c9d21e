"""Shapes, values and copies for which a cast has an edge: odd sizes, NaN, infinities, subnormals, zeros."""

from __future__ import annotations

import torch

from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder

FORMATS = (E4M3, E5M2)
SHAPES = [(1, 1), (1, 8), (8, 8), (13, 37), (3, 5, 7), (129,), (136, 264), (600, 2048), (64, 16384)]
EMPTY = [(0, 16), (16, 0), (0,)]
PATTERNS = ("wide", "any bits", "zeros")
#: rowwise, columnwise, order
COPIES = {
    "row": (True, False, ColumnwiseOrder.TRANSPOSED),
    "transposed": (False, True, ColumnwiseOrder.TRANSPOSED),
    "row + transposed": (True, True, ColumnwiseOrder.TRANSPOSED),
    "row + same order": (True, True, ColumnwiseOrder.SAME),
}
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def copy_flags(copies: str) -> dict[str, object]:
    """The flags of an op that casts, for an entry of COPIES."""
    return dict(zip(("rowwise", "columnwise", "columnwise_order"), COPIES[copies], strict=True))


def draw(shape: tuple[int, ...], dtype: torch.dtype, pattern: str, seed: int = 0) -> torch.Tensor:
    """Values over 17 powers of e, or every seventh one of random bits (NaN, infinities, subnormals), or zeros."""
    generator = torch.Generator().manual_seed(seed)
    if pattern == "zeros":
        return torch.zeros(shape, dtype=dtype)
    spread = torch.empty(shape).uniform_(-8, 9, generator=generator)
    values = (torch.randn(shape, generator=generator) * spread.exp()).to(dtype)
    if pattern == "any bits" and values.numel():
        integer = _INTEGERS[dtype]
        limits = torch.iinfo(integer)
        places = torch.randint(0, values.numel(), (values.numel() // 7 + 1,), generator=generator)
        bits = torch.randint(limits.min, limits.max, places.shape, dtype=integer, generator=generator)
        values.view(integer).view(-1)[places] = bits
    return values
