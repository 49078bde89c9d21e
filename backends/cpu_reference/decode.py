"""Exact decoding of 8-bit codes to values (docs/numerics.md, rule C6)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import E5M2

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat

#: What torch's own conversion on the CPU does with vector instructions. The others it takes one by one, which is
#: slower than looking pairs of codes up.
_VECTORISED = frozenset({(E5M2, torch.float32), (E5M2, torch.float16)})

#: Codes per look-up. The indices and results of that many stay in the second-level cache beside the table.
_PIECE = 1 << 16


def decode(
    codes: torch.Tensor, format: ElementFormat, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of ``codes``. Each is exact: fp32, bf16 and fp16 all hold every value of E4M3 and E5M2.

    Args:
        codes: uint8, any shape and strides.
        format: E4M3 or E5M2.
        dtype: torch.float32, torch.bfloat16 or torch.float16.
        out: contiguous buffer of ``dtype`` and the shape of ``codes``; overwritten.

    Returns:
        ``out`` where given, else a new contiguous tensor.
    """
    if out is None:
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    flat = codes.reshape(-1)
    if flat.stride(0) != 1:  # one element counts as contiguous whatever its stride, and would not be seen as pairs
        flat = flat.clone(memory_format=torch.contiguous_format)
    looked_up = codes.device.type == "cpu" and (format, dtype) not in _VECTORISED
    if looked_up and _starts_on_a_pair(flat) and _starts_on_a_pair(out):
        _look_up(flat, out.view(-1), format)
    else:
        out.copy_(codes.view(format.dtype))
    return out


def _look_up(codes: torch.Tensor, out: torch.Tensor, format: ElementFormat) -> None:
    """Decode two codes at a time: a pair of bytes is the index of a pair of values."""
    table = _pairs(format, out.dtype)
    even = codes.numel() & ~1
    indices, pairs = codes[:even].view(torch.uint16), out[:even].view(table.dtype)
    for start in range(0, len(indices), _PIECE // 2):
        piece = slice(start, start + _PIECE // 2)
        torch.index_select(table, 0, indices[piece].to(torch.int32), out=pairs[piece])
    if codes.numel() > even:
        out[even:].copy_(codes[even:].view(format.dtype))


def _starts_on_a_pair(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() % 2 == 0


@functools.cache
def _pairs(format: ElementFormat, dtype: torch.dtype) -> torch.Tensor:
    """The values of all 65,536 pairs of codes, each pair seen as one integer of twice the width."""
    codes = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16).view(format.dtype)
    return codes.to(dtype).view(torch.int64 if dtype == torch.float32 else torch.int32)
