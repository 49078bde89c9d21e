"""Attention by torch.nn.functional.scaled_dot_product_attention, with the kernels that a backend asks for."""

from __future__ import annotations

import threading

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
) -> torch.Tensor:
    """Attention without a mask tensor, differentiable.

    Args:
        query: ``[b, h, sq, d]``.
        key: ``[b, g, sk, d]``, g a divisor of h.
        value: ``[b, g, sk, dv]``.
        causal: hide keys after the query, aligned top left.
        scale: of the scores.
        dropout: share of probabilities that is dropped.
        kernels: names in SDPBackend in the order in which torch shall try them, set for this call; empty: torch's own
            order. The backward uses the kernel of the forward.

    Returns:
        ``[b, h, sq, dv]``.
    """
    grouped = query.shape[1] != key.shape[1]
    if not kernels:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    order = [SDPBackend.__members__[name] for name in kernels]
    with _ORDER, sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )
