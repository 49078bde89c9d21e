"""Recompute of modules: bit for bit what the same steps give without it, scaling states included."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from counting_backend import Counting
from recomputed_stack import RECIPES, SIZE, WAYS, Plan, layers, same, train
from torch.utils.checkpoint import checkpoint

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.modules import recompute
from te_hal.schema.errors import StateError

EVERY_WAY = pytest.mark.parametrize("way", WAYS)
MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
STATEFUL = pytest.mark.parametrize("name", ["delayed", "custom"])

PLANS = {
    "in_the_middle": Plan(),
    "second_backward_first": Plan(order=(1, 0)),
    "from_the_first_layer": Plan(inside=(0, 2)),
    "the_last_layers": Plan(inside=(2, 4)),
    "all": Plan(inside=(0, 4), opens="inside"),
    "its_own_autocast": Plan(inside=(1, 3), opens="both"),
    "microbatches": Plan(flags=(True, False)),
    "microbatches_second_backward_first": Plan(flags=(True, False), order=(1, 0)),
    "main_grad": Plan(flags=(True, False), fuses=True),
    "main_grad_second_backward_first": Plan(flags=(True, False), fuses=True, order=(1, 0)),
}


@pytest.fixture(scope="module")
def without():
    """Trainings without recompute, each once."""
    found = {}

    def of(name: str, plan: str) -> list[torch.Tensor]:
        if (name, plan) not in found:
            found[name, plan] = train(None, RECIPES[name](), PLANS[plan])
        return found[name, plan]

    return of


@EVERY_WAY
@pytest.mark.parametrize("name", RECIPES)
def test_losses_gradients_and_scaling_states_are_those_without_recompute(name, way, without):
    assert same(train(way, RECIPES[name]()), without(name, "in_the_middle"))


@MODES
@pytest.mark.parametrize("plan", list(PLANS)[1:])
@STATEFUL
def test_wherever_the_function_reaches_and_in_whatever_order_backwards_come(name, plan, reentrant, without):
    way = "torch" if reentrant else "torch_not_reentrant"
    assert same(train(way, RECIPES[name](), PLANS[plan]), without(name, plan))


@MODES
@pytest.mark.parametrize("plan", ["microbatches", "main_grad_second_backward_first"])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_weights_kept_for_microbatches_are_those_of_the_first_run(name, plan, reentrant, without):
    way = "te" if reentrant else "te_not_reentrant"
    assert same(train(way, RECIPES[name](), PLANS[plan]), without(name, plan))


@EVERY_WAY
def test_scales_of_gradients_move_as_without_checkpoint(way):
    """Case B23."""
    scales = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module, chosen = te.Linear(64, 64), recipe.DelayedScaling()
        for _ in range(2):
            x = torch.randn(16, 64, requires_grad=True)
            with te.autocast(recipe=chosen):
                y = WAYS[way](module, x) if recomputed else module(x)
            y.square().sum().backward()
        scales.append(module.fp8_meta["scaling_bwd"].scale)
    assert scales[0][0] != 1.0
    assert torch.equal(*scales)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of the inner one, whose first run has no gradients
@MODES
@pytest.mark.parametrize("name", ["delayed", "custom", "nvfp4"])
def test_one_checkpoint_inside_another(name, reentrant):
    model = layers()

    def run(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    def nested(x):
        return model[3](run(lambda h: model[2](model[1](h)), model[0](x)))

    results = []
    for recomputed in (False, True):
        model.zero_grad()
        for layer in model:
            layer.forget_scaling_state()
        for step in range(3):
            x = (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(step))).bfloat16().requires_grad_()
            torch.manual_seed(step)
            with te.autocast(recipe=RECIPES[name]()):
                y = run(nested, x) if recomputed else model[3](model[2](model[1](model[0](x))))
            y.float().square().mean().backward()
        states = [layer.get_extra_state() for layer in model]
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *states])
    assert same(*results)


@pytest.mark.parametrize("name", ["delayed", "current"])
@MODES
def test_a_graph_that_is_kept_runs_again_as_without_recompute(name, reentrant):
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module, x = te.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
        with te.autocast(recipe=RECIPES[name]()):
            y = checkpoint(module, x, use_reentrant=reentrant) if recomputed else module(x)
        y.square().sum().backward(retain_graph=True)
        once, x.grad = x.grad, None
        y.square().sum().backward()
        results.append([once, x.grad, *(p.grad for p in module.parameters()), module.get_extra_state()])
    assert same(*results)


@pytest.mark.parametrize("other", ["off", "current", "changed"])
@MODES
def test_what_is_in_force_in_the_backward_changes_nothing(other, reentrant):
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module, chosen = te.LayerNormMLP(32, 32), recipe.DelayedScaling(amax_history_len=2)
        for _ in range(2):
            x = torch.randn(32, 32).requires_grad_()
            with te.autocast(recipe=chosen):
                y = checkpoint(module, x, use_reentrant=reentrant) if recomputed else module(x)
            with te.autocast(enabled=other != "off", recipe=recipe.Float8CurrentScaling()):
                if other == "changed":
                    with torch.no_grad():
                        module(x)
                y.square().sum().backward()
            results.append([y, x.grad, *(p.grad.clone() for p in module.parameters()), module.get_extra_state()])
    assert all(map(same, results[:2], results[2:]))


@MODES
def test_a_forward_without_fp8_is_recomputed_without_it(reentrant):
    module, x = te.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    module(x).square().sum().backward()
    plain, x.grad = x.grad, None
    y = checkpoint(module, x, use_reentrant=reentrant)
    with te.autocast():
        y.square().sum().backward()
    assert torch.equal(x.grad, plain)
    assert not module.fp8


@MODES
def test_the_backend_of_the_forward_recomputes(reentrant):
    counting = Counting()
    module = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    with te_hal.use_backend("counting"), te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = checkpoint(module, x, use_reentrant=reentrant)
    first = [launch.op for launch in counting.launches]
    counting.launches.clear()
    y.sum().backward()
    assert [launch.op for launch in counting.launches][: len(first)] == first


@MODES
def test_observers_see_each_forward_once(reentrant):
    module, x = te.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    seen = []
    module.observe_quantizers(lambda key, slot: lambda *_: seen.append((key, slot)))
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = checkpoint(module, x, use_reentrant=reentrant)
    y.sum().backward()
    assert sorted(seen) == [("scaling_bwd", 0), ("scaling_fwd", 0), ("scaling_fwd", 1)]


@MODES
def test_weights_that_live_in_fp8_recompute(reentrant):
    chosen, results = recipe.DelayedScaling(), []
    for recomputed in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=chosen):
            module = te.LayerNormMLP(32, 32)
        x = torch.randn(32, 32).requires_grad_()
        with te.autocast(recipe=chosen):
            y = checkpoint(module, x, use_reentrant=reentrant) if recomputed else module(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters()), module.get_extra_state()])
    assert same(*results)


@MODES
def test_a_second_run_that_does_something_else_is_told(reentrant):
    first, second = te.Linear(32, 32, name="first"), te.Linear(32, 32, name="second")
    turn = [first, second]
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast():
        y = checkpoint(lambda h: turn.pop(0)(h).relu(), x, use_reentrant=reentrant)
    with pytest.raises(StateError, match=r"'second': recompute: got .* but one of Linear 'first'"):
        y.sum().backward()


@MODES
def test_a_second_run_that_does_more_is_told(reentrant):
    module, rounds = te.Linear(32, 32), [1, 2]
    x = torch.randn(16, 32, requires_grad=True)

    def run(h: torch.Tensor) -> torch.Tensor:
        for _ in range(rounds.pop(0)):
            h = module(h)
        return h.relu()

    with te.autocast():
        y = checkpoint(run, x, use_reentrant=reentrant)
    with pytest.raises(StateError, match="but nothing more"):
        y.sum().backward()


def hook_on(tensor: torch.Tensor, module: torch.nn.Module) -> None:
    def hook(_: torch.Tensor) -> None:
        with torch.no_grad(), te.autocast():
            module(torch.randn(16, 32))

    tensor.register_hook(hook)


@pytest.mark.parametrize("way", [None, *WAYS])
def test_a_hook_that_runs_an_fp8_module_is_refused_and_named(way):
    module, other = te.Linear(32, 32), te.Linear(32, 32, name="other")

    def run(x: torch.Tensor) -> torch.Tensor:
        y = module(x)
        if y.requires_grad:
            hook_on(y, other)
        return y + 0

    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast():
        y = run(x) if way is None else WAYS[way](run, x)
    before = other.get_extra_state()
    with pytest.raises(
        NotImplementedError, match=r"Linear 'other': got .*a hook that runs the module.*after the backward"
    ):
        y.sum().backward()
    assert torch.equal(other.get_extra_state(), before)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "torch_autocast"])
@EVERY_WAY
def test_without_fp8_recompute_gives_the_same_bytes(way, autocast):
    module = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 48), torch.nn.GELU(), te.LayerNormMLP(48, 32))
    results = []
    for recomputed in (False, True):
        module.zero_grad()
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = WAYS[way](module, x) if recomputed else module(x)
        y.sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in module.parameters())])
    assert same(*results)


@EVERY_WAY
def test_what_the_first_run_recorded_goes_with_the_graph(way, monkeypatch):
    records = weakref.WeakSet()

    class Seen(recompute.CallRecord):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            records.add(self)

    monkeypatch.setattr(recompute, "CallRecord", Seen)
    with te.autocast():
        y = WAYS[way](te.Linear(32, 32), torch.randn(16, 32, requires_grad=True))
    gc.collect(1)
    assert len(records) == 1
    del y
    gc.collect(1)
    assert len(records) == 0


@MODES
@pytest.mark.parametrize("fuses", [False, True], ids=["", "main_grad"])
@STATEFUL
def test_experts_recompute_an_empty_one_included(name, fuses, reentrant):
    results = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module = te.GroupedLinear(3, 32, 32, fuse_wgrad_accumulation=fuses)
        for parameter in module.parameters():
            parameter.main_grad = torch.full(parameter.shape, 7.0)
        found, graphs = [], []
        for flag in (True, False):
            x = torch.randn(48, 32).requires_grad_()

            def run(h: torch.Tensor, flag: bool = flag, module: te.GroupedLinear = module) -> torch.Tensor:
                return module(h, [32, 0, 16], is_first_microbatch=flag)

            with te.autocast(recipe=RECIPES[name]()):
                graphs.append((x, checkpoint(run, x, use_reentrant=reentrant) if recomputed else run(x)))
        for x, y in reversed(graphs):
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        grads = [p.main_grad if fuses and p.dim() > 1 else p.grad for p in module.parameters()]
        results.append([*found, *grads, module.get_extra_state()])
    assert same(*results)
