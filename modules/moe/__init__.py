"""Mixture of experts: routing, and the way of rows to their experts and back (docs/moe.md)."""

from __future__ import annotations

from te_hal.modules.moe.chunks import moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs
from te_hal.modules.moe.padding import Fp8Padding, Fp8Unpadding
from te_hal.modules.moe.permute import moe_permute, moe_permute_and_pad_with_probs, moe_permute_with_probs
from te_hal.modules.moe.unpermute import moe_unpermute

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]
