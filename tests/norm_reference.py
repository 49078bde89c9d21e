"""Norms in plain torch, in the dtype of what they get."""

from __future__ import annotations

import torch
from torch.nn import functional


def normalised(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """LayerNorm over the last dimension; without beta RMSNorm."""
    factor = gamma + 1 if zero_centered else gamma
    if beta is not None:
        return functional.layer_norm(x, x.shape[-1:], factor, beta, eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor
