"""Row maps: which row of the permuted tensor each token goes to, in Transformer Engine's layouts.

With a mask ``[tokens, experts]`` the map is int32 ``[tokens, 2 experts + 1]``. Of token t, ``map[t, -1]`` is the number
n of its rows; ``map[t, :n]`` are these rows and ``map[t, experts : experts + n]`` their experts, both from the last
expert to the first; the rest is -1. With indices ``[tokens, topk]`` it is int32 ``[topk * tokens]``: of the k-th choice
of token t, ``map[k * tokens + t]`` is its row, or -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_hal.modules.moe.row_functions import NOBODY


class Permutation(NamedTuple):
    """Where rows come from, and where tokens go.

    Attributes:
        source: int64 ``[R]``: the token of each row; NOBODY for a row that is padding.
        slots: int64 ``[tokens, S]``: the rows of each token, NOBODY where there are fewer.
        choices: int64 ``[R]``: each row's place in the flattened ``[tokens, experts]``; NOBODY for padding.
        row_id_map: what the caller gets.
    """

    source: torch.Tensor
    slots: torch.Tensor
    choices: torch.Tensor
    row_id_map: torch.Tensor


def permutation_of_mask(mask: torch.Tensor, rows: int | None, pad_offsets: torch.Tensor | None) -> Permutation:
    """From a mask: rows grouped by expert, within an expert in the order of tokens.

    Args:
        mask: bool ``[tokens, experts]``.
        rows: how many rows there are; None: as many as are routed. With fewer the last ones are as if not routed.
        pad_offsets: int64 ``[experts]``: rows of padding before each expert's first row; None: no padding.
    """
    tokens, experts = mask.shape
    by_expert = mask.t().nonzero()[:rows]  # in the order of rows
    expert, token = by_expert[:, 0], by_expert[:, 1]
    row = torch.arange(len(token), device=mask.device)
    unpadded = torch.full((tokens, experts), NOBODY, dtype=torch.int64, device=mask.device)
    unpadded[token, expert] = row
    row_id_map, last_first = _map_of(unpadded)
    if pad_offsets is not None:
        row = row + pad_offsets[expert]
        last_first = padded(last_first, row_id_map, pad_offsets)
    count = len(token) if rows is None else rows
    source = torch.full((count,), NOBODY, dtype=torch.int64, device=mask.device)
    choices = source.clone()
    source[row] = token
    choices[row] = token * experts + expert
    return Permutation(source, last_first, choices, row_id_map)


def _map_of(unpadded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row map, and of it the rows of each token, as many columns as the token with most rows has."""
    tokens, experts = unpadded.shape
    backwards = unpadded.flip(1)
    order = (backwards < 0).to(torch.uint8).argsort(dim=1, stable=True)
    rows = backwards.gather(1, order)
    of_rows = torch.where(rows < 0, NOBODY, experts - 1 - order)
    counts = (unpadded >= 0).sum(dim=1, keepdim=True)
    most = int(counts.max()) if tokens else 0
    return torch.cat([rows, of_rows, counts], dim=1).to(torch.int32), rows[:, :most]


def permutation_of_indices(indices: torch.Tensor, rows: int | None) -> Permutation:
    """From expert indices: rows grouped by expert, within an expert in the order of tokens and of their choices.

    Args:
        indices: int64 ``[tokens, topk]``; negative ones are dropped.
        rows: as there.
    """
    tokens, topk = indices.shape
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    order = order[flat[order] >= 0][:rows]
    slots = torch.full_like(flat, NOBODY)
    slots[order] = torch.arange(len(order), device=flat.device)
    source = torch.full((len(order) if rows is None else rows,), NOBODY, dtype=torch.int64, device=flat.device)
    source[: len(order)] = order.div(max(topk, 1), rounding_mode="floor")
    slots = slots.view(tokens, topk)
    return Permutation(source, slots, source, slots.t().reshape(-1).to(torch.int32))


def slots_of_mask_map(row_id_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each token and their experts, int64 ``[tokens, S]`` each, NOBODY where a token has fewer."""
    experts = (row_id_map.shape[1] - 1) // 2
    counts = row_id_map[:, -1]
    most = int(counts.max()) if len(counts) else 0
    unused = torch.arange(most, device=row_id_map.device) >= counts[:, None]
    parts = (row_id_map[:, :most], row_id_map[:, experts : experts + most])
    rows, of_rows = (part.to(torch.int64).masked_fill(unused, NOBODY) for part in parts)
    return rows, of_rows


def padded(slots: torch.Tensor, row_id_map: torch.Tensor, pad_offsets: torch.Tensor) -> torch.Tensor:
    """Rows of each token behind the padding of the experts before theirs.

    Args:
        slots: int64 ``[tokens, S]``, without padding.
        row_id_map: which says the experts of these rows.
        pad_offsets: ``[experts]``.
    """
    experts = (row_id_map.shape[1] - 1) // 2
    of_rows = row_id_map[:, experts : experts + slots.shape[1]].to(torch.int64)
    return torch.where(slots < 0, NOBODY, slots + pad_offsets.to(torch.int64)[of_rows.clamp_min(0)])
