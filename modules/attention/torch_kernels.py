"""Attention by torch.nn.functional.scaled_dot_product_attention, with the kernels that a backend asks for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_hal.modules.attention.packing import nothing_of

if TYPE_CHECKING:
    from te_hal.modules.attention.packing import Sequences

#: The order of kernels is a setting of the whole process: two threads that exchanged it would restore each other's.
_ORDER = threading.Lock()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float,
    kernels: tuple[str, ...],
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in which every query sees a key, differentiable.

    Args:
        query: ``[b, h, sq, d]``.
        key: ``[b, g, sk, d]``, g a divisor of h.
        value: ``[b, g, sk, dv]``.
        causal: hide keys after the query, aligned top left.
        scale: of the scores.
        dropout: share of probabilities that is dropped.
        kernels: names in SDPBackend in the order in which torch shall try them, set for this call; empty: torch's own
            order. The backward uses the kernel of the forward.
        hidden: bool, broadcasts to ``[b, h, sq, sk]``, True hides; instead of ``causal``.

    Returns:
        ``[b, h, sq, dv]``.
    """
    seen = None if hidden is None else ~hidden
    grouped = query.shape[1] != key.shape[1]
    if not kernels:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    order = [SDPBackend.__members__[name] for name in kernels]
    with _ORDER, sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: tuple[Sequences, Sequences],
    *,
    causal: bool,
    scale: float,
    dropout: float,
    kernels: tuple[str, ...],
) -> torch.Tensor:
    """The same for sequences in one row of tokens, a call for each; waits for the device to know their lengths.

    Args:
        query: ``[tq, h, d]``.
        key: ``[tk, g, d]``.
        value: ``[tk, g, dv]``.
        sequences: of queries and of keys.
        causal: as in :func:`attend`, in each sequence.
        scale: as in :func:`attend`.
        dropout: as in :func:`attend`.
        kernels: as in :func:`attend`.

    Returns:
        ``[tq, h, dv]``; 0 between sequences, and where a sequence has no keys.
    """
    of_queries, of_keys = (list(zip(s.starts.tolist(), s.lengths.tolist(), strict=True)) for s in sequences)
    pieces, end = [], 0
    for (start, length), (key_start, keys) in zip(of_queries, of_keys, strict=True):
        if not (length and keys):
            continue
        rows = (query[start : start + length], *(t[key_start : key_start + keys] for t in (key, value)))
        first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in rows)
        attended = attend(*first, causal=causal, scale=scale, dropout=dropout, kernels=kernels)
        pieces += [_nothing(start - end, query, value), attended[0].transpose(0, 1)]
        end = start + length
    pieces.append(_nothing(query.shape[0] - end, query, value))
    if not end:
        return pieces[0] + nothing_of(query) + nothing_of(key) + nothing_of(value)
    return torch.cat(pieces)


def _nothing(tokens: int, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_zeros(tokens, query.shape[1], value.shape[2])
