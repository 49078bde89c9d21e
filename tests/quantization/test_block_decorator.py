"""autocast and quantized_model_init as decorators: each call is a block of its own."""

from __future__ import annotations

import threading

import pytest
import torch
from small_linear import data, linear

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling
from te_hal.schema.errors import ArgumentTypeError

MANAGER = te.FP8GlobalStateManager


@pytest.mark.parametrize(
    "block",
    [te.autocast(recipe=Float8CurrentScaling()), te.fp8_autocast(fp8_recipe=Float8CurrentScaling())],
    ids=["autocast", "fp8_autocast"],
)
def test_a_decorated_step_is_the_step_inside_the_block(block):
    module, x = linear(), data()

    @block
    def step(x: torch.Tensor, *, times: float) -> torch.Tensor:
        """Doc."""
        return module(x) * times

    with te.autocast(recipe=Float8CurrentScaling()):
        expected = module(x) * 2
    assert torch.equal(step(x, times=2), expected)
    assert torch.equal(step(x, times=2), expected)
    assert not MANAGER.is_fp8_enabled()
    assert (step.__name__, step.__doc__) == ("step", "Doc.")


def test_histories_roll_after_every_decorated_call_as_after_every_block():
    found = []
    for decorated in (True, False):
        torch.manual_seed(0)
        module, block = linear(), te.autocast(recipe=DelayedScaling(amax_history_len=4))
        step = block(module.forward)
        for x in (torch.ones(16, 32), 2 * torch.ones(16, 32), 3 * torch.ones(16, 32)):
            if decorated:
                step(x)
            else:
                with block:
                    module(x)
        found.append(module.fp8_meta["scaling_fwd"].amax_history.clone())
    assert torch.equal(*found)
    assert found[0][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_decorated_function_may_call_itself():
    seen = []

    @te.autocast(recipe=Float8CurrentScaling())
    def descend(depth: int) -> None:
        seen.append(MANAGER.is_fp8_enabled())
        if depth:
            with te.autocast(enabled=False):
                descend(depth - 1)
                seen.append(MANAGER.is_fp8_enabled())

    descend(2)
    assert seen == [True, True, True, False, False]
    assert not MANAGER.is_fp8_enabled()


def test_threads_may_run_it_at_once():
    meet, seen = threading.Barrier(2, timeout=10), []

    @te.autocast(recipe=Float8CurrentScaling())
    def run() -> None:
        meet.wait()
        seen.append(MANAGER.is_fp8_enabled())
        meet.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [True, True]


def test_an_object_that_is_entered_decorates_all_the_same():
    block = te.autocast(recipe=Float8CurrentScaling())
    ask = block(MANAGER.is_fp8_enabled)
    with block:
        assert ask()
    assert ask()


def test_an_error_inside_leaves_the_block():
    @te.autocast(recipe=Float8CurrentScaling())
    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails()
    assert not MANAGER.is_fp8_enabled()


def test_a_model_that_a_decorated_function_makes_has_quantized_weights():
    @te.quantized_model_init(recipe=Float8CurrentScaling())
    def make(depth: int) -> list[te.Linear]:
        return [te.Linear(32, 32), *(make(depth - 1) if depth else ())]

    assert all(isinstance(module.weight, te.QuantizedTensor) for module in [*make(1), *make(0)])
    assert not isinstance(te.Linear(32, 32).weight, te.QuantizedTensor)


def generates():
    yield


async def waits():
    pass


async def both():
    yield


BAD = {
    "a generator": (generates, "got a generator function"),
    "a coroutine": (waits, "got a coroutine function"),
    "both": (both, "got an asynchronous generator function"),
    "a class": (te.Linear, "got <class"),
    "no function": (3, "got 3"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("block", [te.autocast, te.quantized_model_init], ids=["autocast", "quantized_model_init"])
def test_what_would_run_outside_of_the_block_is_refused(block, case):
    function, said = BAD[case]
    with pytest.raises(ArgumentTypeError, match=f"@{block.__name__}: {said}"):
        block()(function)


def test_a_decorator_without_parentheses_is_refused():
    with pytest.raises(ArgumentTypeError, match="autocast: enabled: got <function"):
        te.autocast(generates)
