"""torch.utils.checkpoint: refused by name over FP8 modules, bit-equal without FP8."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_hal.modules as te
from te_hal import recipe

RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}
MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 48, name="up"), torch.nn.GELU(), te.Linear(48, 32))


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
@pytest.mark.parametrize("name", RECIPES)
@MODES
def test_recompute_over_fp8_is_refused_by_name(reentrant, name, where):
    module, chosen = model(), RECIPES[name]()
    x = torch.randn(16, 32, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=chosen) if where != "outside" else nullcontext():
            return module(x)

    with te.autocast(recipe=chosen) if where != "inside" else nullcontext():
        y = checkpoint(run, x, use_reentrant=reentrant)
    said = r"Linear 'up' \(at 1 of Sequential\): got an FP8 forward inside a backward pass"
    with pytest.raises(NotImplementedError, match=said):
        y.sum().backward()


@pytest.mark.parametrize("name", RECIPES)
@MODES
def test_a_refused_recompute_moves_no_scaling_state(reentrant, name):
    module, chosen = te.Linear(32, 32), RECIPES[name]()
    with te.autocast(recipe=chosen):
        y = checkpoint(module, torch.randn(16, 32, requires_grad=True), use_reentrant=reentrant)
    before = module.get_extra_state()
    with pytest.raises(NotImplementedError, match="activation recompute"):
        y.sum().backward()
    assert torch.equal(module.get_extra_state(), before)


def test_a_hook_that_runs_an_fp8_module_is_refused_and_named():
    module, other = te.Linear(32, 32), te.Linear(32, 32, name="other")
    with te.autocast():
        y = module(torch.randn(16, 32, requires_grad=True))

    def hook(_: torch.Tensor) -> None:
        with torch.no_grad(), te.autocast():
            other(torch.randn(16, 32))

    y.register_hook(hook)
    with pytest.raises(
        NotImplementedError, match=r"Linear 'other': got .*or a hook that runs the module.*after the backward"
    ):
        y.sum().backward()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "torch_autocast"])
@MODES
def test_without_fp8_recompute_gives_the_same_bytes(reentrant, autocast):
    module, results = model(), []
    for recomputed in (False, True):
        module.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = checkpoint(module, x, use_reentrant=reentrant) if recomputed else module(x)
        y.sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    assert all(map(torch.equal, *results))


@MODES
def test_after_fp8_steps_a_step_without_fp8_may_recompute(reentrant):
    module = te.Linear(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast():
        module(x).sum().backward()
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()


@MODES
def test_fp8_modules_beside_the_checkpointed_function_run(reentrant):
    first, middle, last = te.Linear(32, 48), torch.nn.Sequential(torch.nn.GELU(), te.LayerNorm(48)), te.Linear(48, 16)
    results = []
    for recomputed in (False, True):
        for module in (first, last):
            module.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            h = first(x)
            y = last(checkpoint(middle, h, use_reentrant=reentrant) if recomputed else middle(h))
        y.sum().backward()
        results.append([first.weight.grad, last.weight.grad])
    assert all(map(torch.equal, *results))
