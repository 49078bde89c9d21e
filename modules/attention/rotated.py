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
            begin. An encoder's output begins at the first angle, also in a step of generation.
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
    starts = of_keys = None
    if params is not None:
        starts = params.get_seqlens_pre_step(query.device)
        queries = params.cu_seqlens_q.to(query.device) if qkv_format == PACKED else None
        if given["encoder_output"] is None:
            keys, of_keys = queries, starts
    return (
        apply_rotary_pos_emb(query, of_query, cu_seqlens=queries, start_positions=starts, **shared),
        apply_rotary_pos_emb(
            key, of_key, cu_seqlens=queries if keys is None else keys, start_positions=of_keys, **shared
        ),
    )


def _cumulative(given: dict[str, Any], name: str) -> torch.Tensor | None:
    padded: torch.Tensor | None = given[f"cu_seqlens_{name}_padded"]
    return given[f"cu_seqlens_{name}"] if padded is None else padded
