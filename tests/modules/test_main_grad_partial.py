"""fuse_wgrad_accumulation in a backward that leaves weights out: ``backward(inputs=...)`` and ``autograd.grad``."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.modules import ops

FUSED = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
LAYERS = {
    "linear": lambda: te.Linear(32, 32, **FUSED),
    "norm_linear": lambda: te.LayerNormLinear(32, 32, **FUSED),
    "mlp": lambda: te.LayerNormMLP(32, 32, **FUSED),
    "grouped": lambda: te.GroupedLinear(3, 32, 32, **FUSED),
    "stacked": lambda: te.GroupedLinear(3, 32, 32, single_grouped_weight=True, **FUSED),
    "ops": lambda: ops.Linear(32, 32, dtype=torch.bfloat16, accumulate_into_main_grad=True),
}
#: One group is without rows.
SPLITS = [16, 0, 16]
RECIPES = {"plain": None, "current": recipe.Float8CurrentScaling()}


def made(layer: str) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    module = LAYERS[layer]()
    weights = [p for name, p in module.named_parameters() if "weight" in name and "norm" not in name]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, 3.0)
    return module, weights


def forward(module: torch.nn.Module, x: torch.Tensor, chosen: object, **flags: object) -> torch.Tensor:
    arguments = (SPLITS,) if isinstance(module, te.GroupedLinear) else ()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        return module(x, *arguments, **flags)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_only_a_backward_that_asks_for_the_weight_adds_to_its_main_grad(layer, name):
    module, weights = made(layer)
    x = torch.randn(32, 32).to(torch.bfloat16).requires_grad_()
    for weight in weights:
        weight.grad_added_to_main_grad = False
    forward(module, x, RECIPES[name]).sum().backward(inputs=[x])
    torch.autograd.grad(forward(module, x, RECIPES[name]).sum(), x)
    for weight in weights:
        assert torch.equal(weight.main_grad, torch.full(weight.shape, 3.0))
        assert not weight.grad_added_to_main_grad
        assert weight.grad is None
    forward(module, x, RECIPES[name]).sum().backward(inputs=weights)
    twin, twins = made(layer)
    forward(twin, x, RECIPES[name]).sum().backward()
    for weight, expected in zip(weights, twins, strict=True):
        assert torch.equal(weight.main_grad, expected.main_grad)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "ops"])
def test_the_first_microbatch_still_overwrites_after_a_backward_that_left_the_weight_out(layer):
    module, weights = made(layer)
    x = torch.randn(32, 32).to(torch.bfloat16).requires_grad_()
    y = forward(module, x, None, is_first_microbatch=True)
    y.sum().backward(inputs=[x], retain_graph=True)
    y.sum().backward()
    for weight in weights:
        weight.expected = weight.main_grad.clone()
        weight.main_grad.zero_()
    forward(module, x, None).sum().backward()
    assert all(torch.equal(weight.main_grad, weight.expected) for weight in weights)


def test_one_weight_of_several_may_be_asked_for():
    module, (first, second) = made("mlp")
    x = torch.randn(32, 32).to(torch.bfloat16)
    module(x).sum().backward(inputs=[second])
    assert torch.equal(first.main_grad, torch.full(first.shape, 3.0))
    assert not torch.equal(second.main_grad, torch.full(second.shape, 3.0))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_layer_adds_as_ever(use_reentrant):
    module, (weight,) = made("linear")
    twin, (expected,) = made("linear")
    x = torch.randn(32, 32).to(torch.bfloat16).requires_grad_()
    te.checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(weight.main_grad, expected.main_grad)
