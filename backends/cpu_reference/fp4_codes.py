"""Rounding to E2M1 codes and decoding of them (docs/numerics.md, NV4, NV5, NV7)."""

from __future__ import annotations

import functools
import struct

import torch

from te_hal.schema.nvfp4_layout import decoded

#: Largest magnitude of E2M1.
LARGEST = 6.0


def _bits(value: float) -> int:
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found


#: Adding these rounds a small number to a multiple of 0.5, 1 and 2, ties to even, and leaves the multiple in the low
#: bits of the sum. The three grids are those of E2M1 below 2, from 2 to 4 and from 4 on; there their multiples, shifted
#: by 0, 2 and 4, are the codes, and elsewhere they lie above.
_TO_HALVES, _TO_ONES, _TO_TWOS = 1.5 * 2.0**22, 1.5 * 2.0**23, 1.5 * 2.0**24
_ONES_ABOVE = _bits(_TO_ONES) - _bits(_TO_HALVES) - 2
_TWOS_ABOVE = _bits(_TO_TWOS) - _bits(_TO_HALVES) - 4


def encode_magnitudes(values: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The nearest codes of magnitudes from 0 to 6, ties to the even one (NV4).

    Args:
        values: fp32, contiguous; overwritten.
        first: fp32, contiguous, of the same shape; overwritten.
        second: as first.

    Returns:
        Codes from 0 to 7, uint8.
    """
    torch.add(values, _TO_ONES, out=first)
    torch.add(values, _TO_TWOS, out=second)
    codes = values.add_(_TO_HALVES).view(torch.int32)
    torch.minimum(codes, first.view(torch.int32).sub_(_ONES_ABOVE), out=codes)
    torch.minimum(codes, second.view(torch.int32).sub_(_TWOS_ABOVE), out=codes)
    return codes.to(torch.uint8)  # the bits of _TO_HALVES end in a byte of zeros


def round_stochastically(values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Round magnitudes from 0 to 6 to the grid: up where the distance from below exceeds the draw (NV5).

    Args:
        values: fp32; overwritten.
        draws: fp32, of the same shape, between 0 and 1.

    Returns:
        ``values``, numbers of E2M1.
    """
    step = torch.where(values < 2.0, 0.5, torch.where(values < 4.0, 1.0, 2.0))  # noqa: PLR2004 - the format's grid
    scaled = values.div_(step)  # exact, as all that follows
    below = scaled.floor()
    up = (scaled - below) > draws
    return values.copy_(below.add_(up)).mul_(step)


def decode_pairs(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of packed codes ``[..., n / 2]`` in fp32 or bf16, exact: a new contiguous tensor ``[..., n]``."""
    table = _pairs(dtype, str(packed.device))
    found = torch.index_select(table, 0, packed.reshape(-1).to(torch.int32))
    return found.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.cache
def _pairs(dtype: torch.dtype, device: str) -> torch.Tensor:
    """The values of all 256 pairs of codes, each pair seen as one integer of twice the width."""
    packed = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)[:, None]
    return decoded(packed).to(dtype).view(torch.int64 if dtype == torch.float32 else torch.int32).view(-1)
