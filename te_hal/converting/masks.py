"""Masks as torch's attention takes them, with the sizes that belong to queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


def padding_mask(where: str, mask: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """A mask of tokens as ``[batch, 1, 1, keys]``.

    Args:
        where: layer and argument, for messages.
        mask: ``[batch, keys]``, or ``[keys]`` for a batch of one; bool (True hides) or of a floating dtype.
        batch: how many sequences.
        keys: tokens of each.

    Raises:
        ArgumentError: another shape or dtype.
    """
    shapes = [(batch, keys)] + ([(keys,)] if batch == 1 else [])
    return _checked(where, mask, shapes).reshape(batch, 1, 1, keys)


def attention_mask(where: str, mask: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """A mask of queries and keys in a shape that broadcasts to ``sizes``.

    Args:
        where: layer and argument, for messages.
        mask: ``[queries, keys]`` or ``[batch * heads, queries, keys]``; bool (True hides) or of a floating dtype.
        sizes: ``(batch, heads, queries, keys)``.

    Raises:
        ArgumentError: another shape or dtype.
    """
    batch, heads, queries, keys = sizes
    checked = _checked(where, mask, [(queries, keys), (batch * heads, queries, keys)])
    return checked[None, None] if checked.dim() == 2 else checked.view(sizes)  # noqa: PLR2004 - of all heads


def refuse_hint(where: str, name: str, mask: torch.Tensor | None, *, is_causal: bool) -> None:
    """``is_causal`` is a hint about a mask, in torch too: without one it would hide nothing.

    Args:
        where: the layer, for messages.
        name: of the mask.
        mask: the mask.
        is_causal: as it was given.

    Raises:
        ArgumentError: True without a mask.
    """
    if is_causal and mask is None:
        raise ArgumentError(
            f"{where}: is_causal",
            got=f"True without {name}",
            accepted=f"True as a hint beside the causal {name}, as in torch",
            todo=f"pass {name} as well",
        )


def summed(masks: list[torch.Tensor]) -> torch.Tensor | None:
    """One or two masks as one, which broadcasts as they do; None of none.

    Returns:
        Bool where all are, else what is added to the scores: -inf where a bool one hides.
    """
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return masks[0] if len(masks) == 1 else masks[0] | masks[1]
    terms = [_as_added(mask) for mask in masks]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _as_added(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


def _checked(where: str, mask: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    if tuple(mask.shape) in shapes and (mask.dtype == torch.bool or mask.is_floating_point()):
        return mask
    raise ArgumentError(
        where,
        got=f"shape {tuple(mask.shape)} of {mask.dtype}",
        accepted=f"{' or '.join(map(str, shapes))}, bool or floating",
        todo="correct it: queries come before keys, and in bool True hides",
    )
