"""Tensors that kernels get wrong first: odd shapes, unaligned addresses, every kind of special value."""

from __future__ import annotations

import torch

#: Codes of te_hal.h by torch dtype.
DTYPE_CODES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8_E4M3",
    torch.float8_e5m2: "FLOAT8_E5M2",
}
PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

#: One row, one element, odd sizes, less than a tile, a tile's edge on both sides, several tiles.
SHAPES = ((1, 1), (1, 7), (8, 8), (13, 72), (3, 1000), (136, 264), (129, 257))

_BITS = {4: torch.int32, 2: torch.int16}


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, *, special: bool = True, offset: int = 0) -> torch.Tensor:
    """Values over twelve powers of e, some of them any bit pattern; ``offset`` elements off an aligned address."""
    generator = torch.Generator().manual_seed(sum(shape) + 7 * offset)
    spread = torch.empty(shape).uniform_(-6, 6, generator=generator).exp()
    values = (torch.randn(shape, generator=generator) * spread).to(dtype)
    if special and values.numel() > 16:
        bits = _BITS[values.element_size()]
        limit = 2 ** (8 * values.element_size() - 1)
        where = torch.randint(0, values.numel(), (values.numel() // 16 + 8,), generator=generator)
        patterns = torch.randint(-limit, limit, where.shape, generator=generator)
        values.view(bits).view(-1)[where] = patterns.to(bits)
    room = torch.empty(values.numel() + offset, dtype=dtype)
    placed = room[offset:].view(shape)
    placed.view(_BITS[values.element_size()]).copy_(values.view(_BITS[values.element_size()]))
    return placed


def bytes_like(*shape: int) -> torch.Tensor:
    """Codes to be written, filled with a pattern that no kernel leaves there by chance."""
    return torch.full(shape, 0xAA, dtype=torch.uint8)


def same_bytes(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shapes and equal bytes, NaN payloads included."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return torch.equal(got.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))
