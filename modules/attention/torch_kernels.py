"""Attention by torch.nn.functional.scaled_dot_product_attention, with the kernels that a backend asks for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_hal.modules.attention.packing import nothing_of

if TYPE_CHECKING:
    from te_hal.modules.attention.packing import Sequences

#: The order of kernels is a setting of the whole process: two threads that exchanged it would restore each other's.
_ORDER = threading.Lock()


class Settings(NamedTuple):
    """What every call is made with.

    Attributes:
        scale: of the scores.
        dropout: share of probabilities that is dropped.
        kernels: names in SDPBackend in the order in which torch shall try them, set for this call; empty: torch's own
            order. The backward uses the kernel of the forward.
    """

    scale: float
    dropout: float
    kernels: tuple[str, ...]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: Settings,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in which every query sees a key; differentiable.

    Args:
        query: ``[b, h, sq, d]``.
        key: ``[b, g, sk, d]``, g a divisor of h.
        value: ``[b, g, sk, dv]``.
        settings: the rest.
        causal: hide keys after the query, aligned top left.
        seen: bool, broadcasts to ``[b, h, sq, sk]``, False hides; instead of ``causal``.

    Returns:
        ``[b, h, sq, dv]``.
    """
    arguments: dict[str, Any] = {
        "attn_mask": seen,
        "dropout_p": settings.dropout,
        "is_causal": causal,
        "scale": settings.scale,
    }
    arguments["enable_gqa"] = query.shape[1] != key.shape[1]
    if not settings.kernels:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **arguments)
    order = [SDPBackend.__members__[name] for name in settings.kernels]
    with _ORDER, sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **arguments)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor | None,
    settings: Settings,
    *,
    sees_something: bool,
) -> torch.Tensor:
    """The same under a mask; a query that sees nothing gives 0, and takes and gives no gradient.

    Args:
        query: as in :func:`attend`.
        key: as in :func:`attend`.
        value: as in :func:`attend`.
        hidden: bool, broadcasts to ``[b, h, sq, sk]``, True hides; None: nothing does.
        settings: as in :func:`attend`.
        sees_something: every query is known to see a key.

    Returns:
        ``[b, h, sq, dv]``.
    """
    if hidden is None:
        return attend(query, key, value, settings)
    hidden = hidden[(None,) * (query.dim() - hidden.dim())].expand(-1, -1, -1, key.shape[2])
    if sees_something:
        return attend(query, key, value, settings, seen=~hidden)
    nothing = hidden.all(-1, keepdim=True)
    output = attend(query, key, value, settings, seen=nothing | ~hidden)
    return output.masked_fill(nothing, 0.0)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: tuple[Sequences, Sequences],
    settings: Settings,
    *,
    causal: bool,
) -> torch.Tensor:
    """The same for sequences in one row of tokens, a call for each; waits for the device to know their lengths.

    Args:
        query: ``[tq, h, d]``.
        key: ``[tk, g, d]``.
        value: ``[tk, g, dv]``.
        sequences: of queries and of keys.
        settings: as in :func:`attend`.
        causal: as in :func:`attend`, in each sequence.

    Returns:
        ``[tq, h, dv]``; 0 between sequences, and where a sequence has no keys.
    """
    of_queries, of_keys = (list(zip(s.starts.tolist(), s.lengths.tolist(), strict=True)) for s in sequences)
    pieces, end = [], 0
    for (start, length), (key_start, keys) in zip(of_queries, of_keys, strict=True):
        if not (length and keys):
            continue
        own = slice(start, start + length), slice(key_start, key_start + keys)
        rows, own_keys, values = (
            tensor[part].transpose(0, 1).unsqueeze(0)
            for tensor, part in zip((query, key, value), (*own, own[1]), strict=True)
        )
        attended = attend(rows, own_keys, values, settings, causal=causal)
        pieces += [_nothing(start - end, query, value), attended[0].transpose(0, 1)]
        end = start + length
    pieces.append(_nothing(query.shape[0] - end, query, value))
    if not end:
        return pieces[0] + nothing_of(query) + nothing_of(key) + nothing_of(value)
    return torch.cat(pieces)


def _nothing(tokens: int, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_zeros(tokens, query.shape[1], value.shape[2])
