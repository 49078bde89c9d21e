"""GroupedLinear beside one te.Linear per group, and a step of both."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

import te_hal.modules as te
from te_hal import recipe

RECIPES = {
    "none": None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
    "override": lambda: recipe.Float8CurrentScaling(backward_override="high_precision"),
    "override_block": lambda: recipe.Float8BlockScaling(backward_override="dequantized"),
    # Layers draw their random numbers in the order of the backward, which separate ones reverse.
    "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
INS, OUTS = 32, 64


class Step(NamedTuple):
    """What a step gives: output, gradient of the input, and those of weights and biases by group."""

    output: torch.Tensor
    grad_input: torch.Tensor
    grad_weights: list[torch.Tensor]
    grad_biases: list[torch.Tensor]


def grouped(count: int = 4, **arguments: object) -> te.GroupedLinear:
    """One with biases that are not 0."""
    torch.manual_seed(3)
    module = te.GroupedLinear(count, INS, OUTS, **{"params_dtype": torch.bfloat16, **arguments})
    with torch.no_grad():
        for name in module.bias_names:
            getattr(module, name).normal_()
    return module


def weights_of(module: te.GroupedLinear) -> list[torch.Tensor]:
    found = [getattr(module, name) for name in module.weight_names]
    return list(found[0].unbind(0)) if module.single_grouped_weight else found


def biases_of(module: te.GroupedLinear) -> list[torch.Tensor]:
    found = [getattr(module, name) for name in module.bias_names]
    return list(found[0].unbind(0)) if module.single_grouped_bias else found


def singles(module: te.GroupedLinear) -> list[te.Linear]:
    """The groups as layers of their own, with copies of the parameters."""
    made = []
    for weight, bias in zip(weights_of(module), biases_of(module), strict=True):
        layer = te.Linear(INS, OUTS, params_dtype=weight.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        made.append(layer)
    return made


def data(rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gy = torch.randn(rows, INS, generator=generator), torch.randn(rows, OUTS, generator=generator)
    return x.to(dtype), gy.to(dtype)


def autocast(name: str) -> te.autocast:
    make = RECIPES[name]
    return te.autocast(enabled=make is not None, recipe=None if make is None else make())


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def step(
    module: te.GroupedLinear, splits: list[int], x: torch.Tensor, gy: torch.Tensor, chosen: object = None, **how: object
) -> Step:
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x, splits, **how)
    y.backward(gy)
    stacked = (module.single_grouped_weight, module.single_grouped_bias)
    found = [[getattr(module, name).grad for name in names] for names in (module.weight_names, module.bias_names)]
    grads = [list(each[0].unbind(0)) if single else each for each, single in zip(found, stacked, strict=True)]
    return Step(y.detach(), x.grad, *grads)


def step_of_singles(
    layers: list[te.Linear], splits: list[int], x: torch.Tensor, gy: torch.Tensor, chosen: object = None
) -> Step:
    """The same, layer by layer; one without rows is not called."""
    for layer in layers:
        layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        parts = [
            layer(x[end - size : end])
            for layer, size, end in zip(layers, splits, itertools.accumulate(splits), strict=True)
            if size
        ]
    y = torch.cat(parts)
    y.backward(gy[: len(y)])
    return Step(y.detach(), x.grad, [gradient(of.weight) for of in layers], [gradient(of.bias) for of in layers])


def same(one: Step, other: Step) -> bool:
    """Bit for bit."""
    pairs = [(one.output, other.output), (one.grad_input, other.grad_input)]
    pairs += [*zip(one.grad_weights, other.grad_weights, strict=True)]
    pairs += [*zip(one.grad_biases, other.grad_biases, strict=True)]
    return all(torch.equal(*pair) for pair in pairs)
