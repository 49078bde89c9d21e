"""On a GPU: modules captured in graphs give what they give uncaptured."""

from __future__ import annotations

from copy import deepcopy

import native_backends
import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

ROWS, HIDDEN, BF16 = 64, 256, torch.bfloat16
RECIPES = {"none": None, "current": recipe.Float8CurrentScaling(), "block": recipe.Float8BlockScaling()}
MODULES = {
    "Linear": lambda: te.Linear(HIDDEN, 384, params_dtype=BF16, device="cuda"),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, 384, params_dtype=BF16, device="cuda"),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 512, params_dtype=BF16, device="cuda"),
    "TransformerLayer": lambda: te.TransformerLayer(
        HIDDEN, 512, 4, attention_dropout=0.0, hidden_dropout=0.0, params_dtype=BF16, device="cuda"
    ),
}


#: Torch's capture keeps the warm-up's graph alive, made on another stream; it says so once, of its own modules too.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@pytest.fixture
def gpu() -> native_backends.NativeBackend:
    return native_backends.cuda()


def rows() -> torch.Tensor:
    return torch.randn(ROWS, 2, HIDDEN, device="cuda", dtype=BF16)


def step(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """A forward and backward: the output, and the gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    module.zero_grad(set_to_none=True)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [each.detach().clone() for each in (output, x.grad, *gradients)]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_module_replays_what_it_does_uncaptured(gpu, name, kind):
    module, chosen = MODULES[kind](), RECIPES[name]
    captured = deepcopy(module)
    with gpu.use():
        te.make_graphed_callables(captured, (rows().requires_grad_(),), enabled=chosen is not None, recipe=chosen)
        for _ in range(3):
            x = rows()
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                expected = step(module, x)
            found = step(captured, x)
            torch.cuda.synchronize()
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def test_weights_that_change_between_replays_are_read_anew(gpu):
    module, chosen = MODULES["Linear"](), RECIPES["current"]
    x = rows()
    with gpu.use():
        te.make_graphed_callables(module, (x.clone().requires_grad_(),), enabled=True, recipe=chosen)
        before = module(x.requires_grad_()).detach().clone()
        with torch.no_grad():
            module.weight.mul_(2.0)
        after = module(x).detach().clone()
        plain = te.Linear(HIDDEN, 384, params_dtype=BF16, device="cuda")
        plain.load_state_dict(module.state_dict())
        with te.autocast(recipe=chosen):
            expected = plain(x)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)
