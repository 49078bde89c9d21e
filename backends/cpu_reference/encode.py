"""Rounding of scaled values to 8-bit codes (docs/numerics.md, rules C1-C4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat

_NAN_CODE = 0x7F


def encode(values: torch.Tensor, format: ElementFormat, codes: torch.Tensor | None = None) -> torch.Tensor:
    """Clamp fp32 ``values`` in place and round them to the nearest codes, ties to even (C1-C4).

    Clamping comes first because torch's own conversion gives NaN, infinity or the largest code beyond the range,
    by format and version. After it all is finite or NaN, so the sum is NaN exactly if an element is.

    Args:
        values: fp32, already scaled; overwritten.
        format: E4M3 or E5M2.
        codes: contiguous uint8 of the same shape to write to; None: a new tensor.
    """
    if codes is None:
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    codes.view(format.dtype).copy_(values.clamp_(-format.max, format.max))
    if values.sum().isnan():
        codes.masked_fill_(values.isnan(), _NAN_CODE)
    return codes
