"""Exact decoding of 8-bit codes (docs/numerics.md, rule C6)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import E4M3

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat


def decode(
    codes: torch.Tensor, format: ElementFormat, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The values of ``codes``: every one is exact in fp32 and bf16, and in fp16.

    Args:
        codes: uint8, any shape and strides.
        format: E4M3 or E5M2.
        dtype: dtype of the values.
        out: contiguous buffer of the shape of ``codes``, overwritten.

    Returns:
        ``out`` where given, else a new contiguous tensor.
    """
    if out is None:
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    return out.copy_(codes.view(format.dtype))
