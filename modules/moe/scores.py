"""Scores of experts from a router's logits, in fp32, and the choice of the best ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: Added to sums of scores that are divided by.
EPSILON = 1e-20


def _sqrtsoftplus(logits: torch.Tensor) -> torch.Tensor:
    # Softplus underflows to 0, where the root has no slope.
    smallest = torch.finfo(logits.dtype).tiny
    return torch.nn.functional.softplus(logits).clamp_min(smallest).sqrt()


#: Scores of each expert by itself.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}
SCORE_FUNCTIONS = ("softmax", *SCORES)


def shares(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Scores over their sum; as they are where one expert is chosen."""
    return scores / (scores.sum(dim=-1, keepdim=True) + EPSILON) if topk > 1 else scores


def best(scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> torch.Tensor:
    """Indices of the ``topk`` largest scores, int64 ``[..., topk]``, best first; of equal ones the lower index.

    Args:
        scores: ``[..., experts]``, without gradient.
        topk: how many.
        num_groups: of consecutive experts; None: no groups.
        group_topk: choose within this many groups, those whose best ``topk // group_topk`` scores sum up highest.
    """
    if num_groups is not None and group_topk is not None:
        grouped = scores.view(*scores.shape[:-1], num_groups, scores.shape[-1] // num_groups)
        of_group = grouped.sort(dim=-1, descending=True).values[..., : topk // group_topk].sum(dim=-1)
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, best(of_group, group_topk), value=True)
        scores = grouped.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
