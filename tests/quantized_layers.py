"""Layers made under quantized_model_init, and one step of them."""

from __future__ import annotations

import torch

import te_hal.modules as te
from te_hal import recipe

RECIPES = {
    "current": recipe.Float8CurrentScaling,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
}
EVERY = {
    **RECIPES,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}


def quantized(name: str = "current", cls: type = te.Linear, **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=EVERY[name](), preserve_high_precision_init_val=arguments.pop("keep", False)):
        return cls(32, 64, **{"params_dtype": torch.bfloat16, **arguments})


def run(module: torch.nn.Module, name: str, seed: int = 1, **arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = next(p for key, p in module.named_parameters() if key.endswith("weight") and "norm" not in key)
    x = torch.randn(32, 32, generator=generator).to(weight.dtype).requires_grad_()
    torch.manual_seed(seed)  # of stochastic rounding
    with te.autocast(recipe=EVERY[name]()):
        y = module(x, **arguments)
    y.float().square().sum().backward()
    return y.detach(), x.grad
