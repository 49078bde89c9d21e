"""autocast in several threads: each has its own, and a graph keeps the one of its forward."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from small_linear import RECIPES, data, linear

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

MANAGER = te.FP8GlobalStateManager


def in_threads(*works: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


def test_a_thread_starts_outside_of_the_autocast_that_started_it():
    seen = []
    with te.autocast():
        in_threads(lambda: seen.append(MANAGER.is_fp8_enabled()))
    assert seen == [False]


def test_threads_with_different_recipes_do_not_disturb_each_other():
    barrier = threading.Barrier(3, timeout=20)
    alone: dict[str, list[torch.Tensor]] = {}
    together: dict[str, list[torch.Tensor]] = {}
    recipes = {
        "max": lambda: DelayedScaling(amax_history_len=4),
        "newest": lambda: DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
        "current": Float8CurrentScaling,
    }
    torch.manual_seed(0)
    states = {name: linear().state_dict() for name in recipes}
    xs = {name: [data(2.0**step) for step in range(6)] for name in recipes}

    def train(name: str, results: dict[str, list[torch.Tensor]], wait: Callable[[], object]) -> None:
        module = linear()
        module.load_state_dict(states[name])
        outputs = []
        for x in xs[name]:
            wait()
            with te.autocast(recipe=recipes[name]()):
                wait()
                y = module(x)
                wait()
            wait()
            y.square().sum().backward()
            outputs += [y.detach(), module.weight.grad.clone()]
        results[name] = [*outputs, module.state_dict()["_extra_state"]]

    for name in recipes:
        train(name, alone, lambda: None)
    in_threads(*(lambda name=name: train(name, together, barrier.wait) for name in recipes))
    for name in recipes:
        assert all(torch.equal(one, other) for one, other in zip(alone[name], together[name], strict=True)), name


def test_the_backward_of_another_threads_graph_updates_that_graphs_modules():
    module, other = linear(), linear()
    graphs = []

    def forward() -> None:
        with te.autocast(recipe=RECIPES["delayed"]()):
            graphs.append(module(torch.ones(16, 32)))

    in_threads(forward)
    with te.autocast(recipe=RECIPES["delayed"]()):
        mine = other(torch.ones(16, 32))
    graphs[0].backward(torch.full((16, 32), 3.0))
    assert module.fp8_meta["scaling_bwd"].amax_history[-1].tolist() == [3.0, 0.0]
    assert not other.fp8_meta["scaling_bwd"].amax_history.any()
    mine.backward(torch.full((16, 32), 2.0))
    assert other.fp8_meta["scaling_bwd"].amax_history[-1].tolist() == [2.0, 0.0]


def test_two_threads_use_one_object_in_turn_but_not_at_once():
    autocast = te.autocast(recipe=Float8CurrentScaling())
    with autocast, pytest.raises(StateError, match="already entered"):
        in_threads(autocast.__enter__)

    def use() -> None:
        with autocast:
            assert MANAGER.is_fp8_enabled()

    in_threads(use)
    use()
