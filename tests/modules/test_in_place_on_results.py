"""What a module returns can be written to, as what torch's own layers return can be."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

SHAPES = [(16, 32), (2, 8, 32)]
RECIPES = {"none": None, "delayed": recipe.DelayedScaling(), "current": recipe.Float8CurrentScaling()}
CHANGES = {
    "relu": lambda y, _: torch.nn.functional.relu(y, inplace=True),
    "residual": lambda y, x: y.add_(x),
    "scaled": lambda y, _: y.mul_(2.0),
}
LAYERS = {
    "Linear": lambda: (te.Linear(32, 32), torch.nn.Linear(32, 32)),
    "LayerNorm": lambda: (te.LayerNorm(32), torch.nn.LayerNorm(32)),
    "LayerNorm of two sizes": lambda: (te.LayerNorm((8, 32)), torch.nn.LayerNorm((8, 32))),
    "RMSNorm": lambda: (te.RMSNorm(32), torch.nn.RMSNorm(32, eps=1e-5)),
}


def run(layer, change, x):
    """The result after the change, and the gradients of input and parameters."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = change(layer(leaf), x)
    y.sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(shape, layer, change):
    if layer == "LayerNorm of two sizes" and len(shape) == 2:
        shape = (1, 8, 32)
    ours, torchs = LAYERS[layer]()
    torchs.load_state_dict({k: v for k, v in ours.state_dict().items() if not k.endswith("_extra_state")})
    x = torch.randn(shape)
    for found, expected in zip(run(ours, CHANGES[change], x), run(torchs, CHANGES[change], x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writing_in_place_gives_the_bytes_of_writing_elsewhere(shape, recipe_name, change):
    layer, x = te.Linear(32, 32), torch.randn(shape)

    def results(prepare):
        chosen = RECIPES[recipe_name]
        layer.forget_scaling_state()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            return run(layer, lambda y, x: CHANGES[change](prepare(y), x), x)

    for found, expected in zip(results(lambda y: y), results(torch.clone), strict=True):
        assert torch.equal(found, expected)
