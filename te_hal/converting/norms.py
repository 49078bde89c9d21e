"""nn.LayerNorm and nn.RMSNorm as LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.converting.replacement import hand_over
from te_hal.modules import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from torch import nn

    from te_hal.quantization.operand_formats import Formats


def layernorm(old: nn.LayerNorm, formats: Formats) -> LayerNorm | str:
    """The counterpart, or why there is none."""
    del formats  # a norm is computed in its own precision
    if not old.elementwise_affine or old.bias is None:
        return "te_hal's LayerNorm has a weight and a bias"
    new = LayerNorm(old.normalized_shape, eps=old.eps, dtype=old.weight.dtype, device="meta")
    hand_over(new, old, {"weight": "weight", "bias": "bias"})
    return new


def rmsnorm(old: nn.RMSNorm, formats: Formats) -> RMSNorm | str:
    """The counterpart, or why there is none. An eps of None is the weight's own, which torch takes from the input."""
    del formats
    if not old.elementwise_affine:
        return "te_hal's RMSNorm has a weight"
    eps = torch.finfo(old.weight.dtype).eps if old.eps is None else old.eps
    new = RMSNorm(old.normalized_shape, eps=eps, dtype=old.weight.dtype, device="meta")
    hand_over(new, old, {"weight": "weight"})
    return new
