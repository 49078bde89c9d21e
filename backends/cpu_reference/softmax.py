"""Scaled, masked softmax in plain torch (docs/numerics.md, rules X1-X4)."""

from __future__ import annotations

import torch

_HIDDEN_SCORE = float("-inf")


def softmax_fwd(
    input: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Softmax of ``scale * input`` over the last dimension, over the keys that a query may see.

    A key is hidden if any of mask, causal and window hides it (X2); its probability is exactly 0, whatever its
    score. A row with nothing to see, or with every visible score at -inf, is all zeros, and NaN or +inf in a visible
    score makes every visible probability of its row NaN (X3).
    """
    out_dtype = out_dtype or input.dtype
    if input.numel() == 0:
        return torch.empty(input.shape, dtype=out_dtype, device=input.device)
    scores = input.to(torch.float32) * scale
    hidden = _hidden(scores, mask, causal, window)
    if hidden is not None:
        scores.masked_fill_(hidden, _HIDDEN_SCORE)
    # Also where all of a row is hidden, and where +inf or NaN beside a hidden score made it NaN.
    return torch.softmax(scores, -1).masked_fill_(scores == _HIDDEN_SCORE, 0.0).to(out_dtype)


def softmax_bwd(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """``scale * output * (grad_output - sum(grad_output * output))`` in fp32, rounded once (X4).

    Where ``output`` is 0 (hidden, or too small to show), or causal and window hide a key, the gradient is 0 and
    ``grad_output`` is not looked at, so that infinities behind a mask stay there.
    """
    probabilities = output.to(torch.float32)
    untouched = probabilities == 0.0
    hidden = _hidden(probabilities, None, causal, window)
    if hidden is not None:
        untouched |= hidden
        probabilities = probabilities.masked_fill(hidden, 0.0)
    grads = grad_output.to(torch.float32).masked_fill(untouched, 0.0)
    projection = (grads * probabilities).sum(-1, keepdim=True)
    grad_input = grads.sub_(projection).mul_(probabilities).mul_(scale)
    return grad_input.masked_fill_(untouched, 0.0).to(grad_output.dtype)


def _hidden(
    scores: torch.Tensor, mask: torch.Tensor | None, causal: str, window: tuple[int, int]
) -> torch.Tensor | None:
    """Where a key is hidden, in a shape that broadcasts to ``scores``; None if nothing is (X2)."""
    left, right = window
    if causal != "none":
        right = 0
    if (left, right) == (-1, -1):
        return mask
    queries, keys = scores.shape[-2:]
    offset = keys - queries if causal == "bottom_right" else 0
    key = torch.arange(keys, device=scores.device)
    diagonal = torch.arange(offset, offset + queries, device=scores.device).unsqueeze(1)
    outside = torch.zeros(queries, keys, dtype=torch.bool, device=scores.device)
    if left >= 0:
        outside |= key < diagonal - left
    if right >= 0:
        outside |= key > diagonal + right
    return outside if mask is None else outside | mask
