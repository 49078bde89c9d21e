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
    "padding_causal_bottom_right": "bottom_right",
    "arbitrary": None,
}


def visible(
    mask_type: str,
    sizes: tuple[int, int, int, int],
    attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
) -> torch.Tensor:
    """``[b, h, sq, sk]``: whether a query sees a key; ``bottom_right`` counts where the mask type is not causal."""
    seen = torch.zeros(sizes, dtype=torch.bool)
    shifts = offsets(mask_type, sizes, attention_mask, bottom_right)
    both = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(size) for size in sizes)).tolist():
        hidden = False
        if mask_type.startswith("padding"):
            hidden = bool(both[0][b, 0, 0, i]) or bool(both[1][b, 0, 0, j])
        elif mask_type == "arbitrary":
            hidden = bool(attention_mask.expand(sizes)[b, h, i, j])
        place, (left, right) = i + shifts[b], window
        hidden = hidden or (CAUSAL[mask_type] is not None and j > place)
        hidden = hidden or (left >= 0 and j < place - left) or (right >= 0 and j > place + right)
        seen[b, h, i, j] = not hidden
    return seen


def offsets(
    mask_type: str,
    sizes: tuple[int, int, int, int],
    attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    bottom_right: bool = True,
) -> list[int]:
    """Of each sequence, the place of the first query among the keys."""
    batch, _, queries, keys = sizes
    if CAUSAL[mask_type] == "top_left" or (CAUSAL[mask_type] is None and not bottom_right):
        return [0] * batch
    if not mask_type.startswith("padding"):
        return [keys - queries] * batch
    both = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
    ends = [[max([-1, *(~mask[b, 0, 0]).nonzero().flatten().tolist()]) for b in range(batch)] for mask in both]
    return [of_keys - of_queries for of_queries, of_keys in zip(*ends, strict=True)]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    *,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
    joins: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[b, h, sq, dv]`` of ``[b, h, sq, d]``, ``[b, g, sk, d]`` and ``[b, g, sk, dv]``, all float64.

    ``before`` and ``after`` are added before and after the scale, ``[b, h, sq, sk]``; the exponential of ``joins``,
    ``[h]``, joins the sum.
    """
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                chosen = seen[b, h, i].nonzero().flatten()
                if not len(chosen):
                    rows.append(query[b, h, i].sum() * value.new_zeros(value.shape[-1]))
                    continue
                scores = key[b, h // shared, chosen] @ query[b, h, i]
                scores = (scores if before is None else scores + before[b, h, i, chosen]) * scale
                scores = scores if after is None else scores + after[b, h, i, chosen]
                weights = (scores - scores.max()).exp()
                rest = 0.0 if joins is None else (joins[h] - scores.max()).exp()
                rows.append((weights / (weights.sum() + rest)) @ value[b, h // shared, chosen])
    if not rows:
        return query.new_zeros(batch, heads, queries, value.shape[-1])
    return torch.stack(rows).view(batch, heads, queries, value.shape[-1])


def heads_first(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` from a format, or, of ``[b, h, s, d]``, the format."""
    return tensor.permute(1, 2, 0, 3) if qkv_format == "sbhd" else tensor.permute(0, 2, 1, 3)


def merged(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` as the module returns it."""
    ordered = tensor.permute(2, 0, 1, 3) if qkv_format == "sbhd" else tensor.permute(0, 2, 1, 3)
    return ordered.flatten(2)
