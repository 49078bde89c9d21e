"""float64 oracles of the norm family (N1 to N4)."""

from __future__ import annotations

from typing import Any

import torch

from te_hal.testing.oracles.bounded import Due, oracle


def _gamma(given: dict[str, Any]) -> torch.Tensor:
    gamma: torch.Tensor = given["weight"].double()
    return gamma + 1 if given["zero_centered_gamma"] else gamma


def normalised(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """output, mean (LayerNorm's) and rstd, differentiable in ``input``, ``weight`` and ``bias``."""
    x = given["input"].double()
    mean = x.mean(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    centred = x - mean.unsqueeze(-1) if "bias" in given else x
    square = centred.square().mean(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    rstd = 1 / (square + given["epsilon"]).sqrt()
    output = centred * rstd.unsqueeze(-1) * _gamma(given)
    return {"output": output + given["bias"].double() if "bias" in given else output, "mean": mean, "rstd": rstd}


@oracle("layernorm_fwd", "rmsnorm_fwd")
def forward(given: dict[str, Any]) -> dict[str, Due]:
    """Output and statistics."""
    found = normalised(given)
    x = given["input"].double()
    size = (x.abs() + found["mean"].abs().unsqueeze(-1)) if "bias" in given else x.abs()
    terms = size * found["rstd"].unsqueeze(-1) * _gamma(given).abs()
    due = {"output": Due(found["output"], terms + found["output"].abs()), "rstd": Due(found["rstd"], found["rstd"])}
    if "bias" in given:
        due["output"] = Due(found["output"], terms + given["bias"].double().abs())
        due["mean"] = Due(found["mean"], x.abs().mean(-1))
    return due


@oracle("layernorm_bwd", "rmsnorm_bwd")
def backward(given: dict[str, Any]) -> dict[str, Due]:
    """Gradients of input, weight and bias."""
    grad, x, rstd = given["grad_output"].double(), given["input"].double(), given["rstd"].double().unsqueeze(-1)
    centred = "mean" in given
    n = (x - given["mean"].double().unsqueeze(-1) if centred else x) * rstd
    sizes = ((x.abs() + given["mean"].double().abs().unsqueeze(-1)) if centred else x.abs()) * rstd
    g = grad * _gamma(given)
    along = (g * n).mean(-1, keepdim=True)
    mean = g.mean(-1, keepdim=True) if centred else torch.zeros_like(along)
    sized = (g * sizes).abs().mean(-1, keepdim=True)
    value = rstd * (g - mean - n * along)
    terms = rstd.abs() * (g.abs() + g.abs().mean(-1, keepdim=True) + sizes * sized)
    rows = tuple(range(grad.dim() - 1))
    due = {"grad_input": Due(value, terms), "grad_weight": _summed(grad * n, (grad * sizes).abs(), rows)}
    if centred:
        due["grad_bias"] = _summed(grad, grad.abs(), rows)
    return due


def _summed(values: torch.Tensor, sizes: torch.Tensor, rows: tuple[int, ...]) -> Due:
    return Due(values.sum(rows), sizes.sum(rows)) if rows else Due(values, sizes)
