"""Attention: DotProductAttention, MultiheadAttention, rotary position embedding (docs/attention.md)."""

from __future__ import annotations

from te_hal.modules.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]
