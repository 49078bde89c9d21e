"""float64 oracles of the softmax family (X1 to X4)."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_hal.testing.oracles.bounded import Due, oracle

#: An exponential below fp32's normal range may come out as zero.
_FLUSHED = 2.0**-126


def hidden_keys(given: dict[str, Any]) -> torch.Tensor:
    """True where a query does not see a key (X2)."""
    hidden = keys_outside(given["input"].shape, given)
    return hidden if given["mask"] is None else hidden | given["mask"]


def keys_outside(shape: torch.Size, given: dict[str, Any]) -> torch.Tensor:
    """The same by causal and window alone."""
    queries, keys = shape[-2:]
    query, key = torch.arange(queries).unsqueeze(1), torch.arange(keys).unsqueeze(0)
    causal, (left, right) = given["causal"], given["window"]
    diagonal = query + (keys - queries if causal == "bottom_right" else 0)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal != "none":
        right = 0
    if left >= 0:
        hidden |= key < diagonal - left
    if right >= 0:
        hidden |= key > diagonal + right
    return hidden


def probabilities(given: dict[str, Any]) -> torch.Tensor:
    """The op's output, differentiable in ``input``."""
    scores: torch.Tensor = given["input"].double() * given["scale"]
    hidden = hidden_keys(given).expand(scores.shape) | (scores == -math.inf)
    scores = scores.masked_fill(hidden, -math.inf)
    if not scores.shape[-1]:
        return scores
    empty = hidden.all(-1, keepdim=True)
    found: torch.Tensor = torch.where(empty, 0.0, scores).softmax(-1)
    return torch.where(empty | hidden, 0.0, found)


@oracle("softmax_fwd")
def forward(given: dict[str, Any]) -> dict[str, Due]:
    """An error of fp32 in a score is one of the exponent, so it grows with the score."""
    found = probabilities(given)
    scores = (given["input"].double() * given["scale"]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    size = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores
    return {"output": Due(found, found * (1 + scores + size) + _FLUSHED)}


@oracle("softmax_bwd")
def backward(given: dict[str, Any]) -> dict[str, Due]:
    """Where the probability is 0, or a key hidden, the gradient is 0 and takes no part (X4)."""
    grad, scale = given["grad_output"].double(), given["scale"]
    y = given["output"].double().masked_fill(keys_outside(grad.shape, given), 0.0)
    seen = torch.where(y == 0, 0.0, grad)
    value = scale * y * (seen - (seen * y).sum(-1, keepdim=True))
    size = abs(scale) * y * (seen.abs() + (seen * y).abs().sum(-1, keepdim=True))
    return {"grad_input": Due(torch.where(y == 0, 0.0, value), size)}
