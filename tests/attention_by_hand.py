"""Attention by definition, in float64, query by query: what the modules are compared with."""

from __future__ import annotations

import torch

#: Mask type to how its causal part is aligned.
CAUSAL = {
    "no_mask": None,
    "causal": "top_left",
    "causal_bottom_right": "bottom_right",
    "padding": None,
    "padding_causal": "top_left",
    "arbitrary": None,
}


def visible(
    mask_type: str,
    sizes: tuple[int, int, int, int],
    attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``[b, h, sq, sk]``: whether a query sees a key."""
    batch, heads, queries, keys = sizes
    diagonal = {None: keys, "top_left": 0, "bottom_right": keys - queries}[CAUSAL[mask_type]]
    seen = torch.zeros(sizes, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    hidden = False
                    if mask_type.startswith("padding"):
                        both = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
                        hidden = bool(both[0][b, 0, 0, i]) or bool(both[1][b, 0, 0, j])
                    elif mask_type == "arbitrary":
                        hidden = bool(attention_mask.expand(sizes)[b, h, i, j])
                    seen[b, h, i, j] = j <= i + diagonal and not hidden
    return seen


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """``[b, h, sq, dv]`` of ``[b, h, sq, d]``, ``[b, g, sk, d]`` and ``[b, g, sk, dv]``, all float64."""
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                chosen = seen[b, h, i].nonzero().flatten()
                if len(chosen):
                    scores = key[b, h // shared, chosen] @ query[b, h, i] * scale
                    weights = (scores - scores.max()).exp()
                    rows.append((weights / weights.sum()) @ value[b, h // shared, chosen])
                else:
                    rows.append(query[b, h, i].sum() * value.new_zeros(value.shape[-1]))
    return torch.stack(rows).view(batch, heads, queries, value.shape[-1])


def heads_first(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` from a format, or, of ``[b, h, s, d]``, the format."""
    return tensor.permute(1, 2, 0, 3) if qkv_format == "sbhd" else tensor.permute(0, 2, 1, 3)


def merged(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` as the module returns it."""
    ordered = tensor.permute(2, 0, 1, 3) if qkv_format == "sbhd" else tensor.permute(0, 2, 1, 3)
    return ordered.flatten(2)
