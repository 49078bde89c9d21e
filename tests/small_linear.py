"""A Linear of 32 features, data for it, and what its delayed scaling has recorded of the forward."""

from __future__ import annotations

import torch

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling

#: Makers of recipes, each call a recipe object of its own.
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
}


def linear() -> te.Linear:
    return te.Linear(32, 32)


def data(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(16, 32) * scale


def high_precision(module: te.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, module.weight, module.bias)


def newest(module: te.Linear) -> list[float]:
    return module.fp8_meta["scaling_fwd"].amax_history[-1].tolist()


def running(module: te.Linear) -> list[float]:
    return module.fp8_meta["scaling_fwd"].amax_history[0].tolist()
