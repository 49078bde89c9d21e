"""Queries and keys of MultiheadAttention rotated by their positions, wherever their sequences begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.attention.layout import PACKED
from te_hal.modules.attention.rope import apply_rotary_pos_emb

if TYPE_CHECKING:
    import torch

    from te_hal.modules.inference import InferenceParams


def rotated(
    query: torch.Tensor, key: torch.Tensor, given: dict[str, Any], *, qkv_format: str, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated.

    Args:
        query: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``.
        key: the same with its own heads.
        given: the arguments of MultiheadAttention.forward by name: ``rotary_pos_emb``, and what says where sequences
            begin.
        qkv_format: of both.
        interleaved: as in apply_rotary_pos_emb.

    Raises:
        ArgumentError: as apply_rotary_pos_emb.
    """
    angles = given["rotary_pos_emb"]
    of_query, of_key = angles if isinstance(angles, (tuple, list)) else (angles, angles)
    shared: dict[str, Any] = {"tensor_format": qkv_format, "interleaved": interleaved, "fused": True}
    queries, keys = (_cumulative(given, name) if qkv_format == PACKED else None for name in ("q", "kv"))
    params: InferenceParams | None = given["inference_params"]
    if params is not None:
        shared["start_positions"] = params.get_seqlens_pre_step(query.device)
        queries = keys = params.cu_seqlens_q.to(query.device) if qkv_format == PACKED else None
    return (
        apply_rotary_pos_emb(query, of_query, cu_seqlens=queries, **shared),
        apply_rotary_pos_emb(key, of_key, cu_seqlens=queries if keys is None else keys, **shared),
    )


def _cumulative(given: dict[str, Any], name: str) -> torch.Tensor | None:
    padded: torch.Tensor | None = given[f"cu_seqlens_{name}_padded"]
    return given[f"cu_seqlens_{name}"] if padded is None else padded
