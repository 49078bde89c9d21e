"""nn.Linear as Linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.converting.replacement import hand_over, reason_against_fp8
from te_hal.modules import Linear

if TYPE_CHECKING:
    from torch import nn

    from te_hal.quantization.operand_formats import Formats


def linear(old: nn.Linear, formats: Formats) -> Linear | str:
    """The counterpart, or why there is none."""
    reason = reason_against_fp8(tuple(old.weight.shape), formats)
    return reason or make_linear(old)


def make_linear(old: nn.Linear) -> Linear:
    """The counterpart, with the old one's parameters."""
    has_bias = old.bias is not None
    new = Linear(old.in_features, old.out_features, bias=has_bias, params_dtype=old.weight.dtype, device="meta")
    hand_over(new, old, {"weight": "weight", "bias": "bias"} if has_bias else {"weight": "weight"})
    return new
