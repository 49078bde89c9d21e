"""Attention: DotProductAttention, MultiheadAttention, rotary position embedding (docs/attention.md)."""

from __future__ import annotations

from te_hal.modules.attention.choice import Choice
from te_hal.modules.attention.dot_product_attention import DotProductAttention
from te_hal.modules.attention.multihead_attention import MultiheadAttention
from te_hal.modules.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["Choice", "DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb"]
