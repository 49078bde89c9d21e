"""The plan of a linear layer: asked and bound once, run by forward and backward, dropped with its selection."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
from counting_backend import COLUMNWISE_IN_BACKWARD, Counting

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.support import SUPPORTED, Call, Code, Support

RECIPES = {"none": lambda: None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


@pytest.mark.parametrize("name", RECIPES)
def test_capability_is_asked_once_whatever_the_shape_and_the_step(name):
    counting = Counting()
    te_hal.set_backend("counting")
    module, chosen = te.Linear(32, 48), RECIPES[name]()
    asked = []
    for rows in (16, 16, 8, 64):
        x = torch.randn(rows, 32, requires_grad=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            before = len(counting.questions)
            y = module(x)
            asked.append(len(counting.questions) - before)
        before = len(counting.questions)
        y.sum().backward()
        # The scaling state's own op is no part of the plan.
        assert {call.op for call in counting.questions[before:]} <= {"update_delayed_scale"}
    assert asked[0] > 0
    assert asked[1:] == [0, 0, 0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_launch_of_a_step_was_asked_for_before_the_first(name):
    counting = Counting()
    te_hal.set_backend("counting")
    module = te.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(enabled=name != "none", recipe=RECIPES[name]()):
        with torch.no_grad():
            module(x)  # makes the scaling state, which has questions of its own
        asked = len(counting.questions)
        module(x)
        plan_questions = counting.questions[asked:]
    gemms = [call.flags["layout"] for call in plan_questions if call.op == "gemm"]
    assert gemms == ["fprop", "dgrad", "wgrad"]
    assert [call.flags["dtype"] for call in plan_questions if call.op == "quantize"] == (
        [] if name == "none" else [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]
    )


def test_the_questions_describe_the_copies_that_will_be_there():
    counting = Counting(reads=COLUMNWISE_IN_BACKWARD)
    te_hal.set_backend("counting")
    module = te.Linear(32, 48)
    module.weight.requires_grad_(requires_grad=False)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        with torch.no_grad():
            module(torch.randn(16, 32))
        asked = len(counting.questions)
        module(torch.randn(16, 32, requires_grad=True))
    kinds = {
        call.flags["layout"]: (repr(call.kinds["a"]), repr(call.kinds["b"]))
        for call in counting.questions[asked:]
        if call.op == "gemm"
    }
    assert kinds == {
        "fprop": ("E4M3/tensor/rowwise", "E4M3/tensor/rowwise+columnwise"),
        "dgrad": ("E5M2/tensor/rowwise", "E4M3/tensor/columnwise"),
    }


def test_the_cast_that_a_backward_repeats_is_asked_for_with_the_copy_it_makes_there():
    counting = Counting(reads=COLUMNWISE_IN_BACKWARD)
    te_hal.set_backend("counting")
    module = te.Linear(32, 48, save_original_input=True)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        with torch.no_grad():
            module(torch.randn(16, 32))
        asked = len(counting.questions)
        module(torch.randn(16, 32))
    casts = [call.flags for call in counting.questions[asked:] if call.op == "quantize"]
    found = [(flags["dtype"], flags["rowwise"], flags["columnwise"]) for flags in casts]
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    expected = [(e4m3, True, False), (e4m3, True, False), (e5m2, False, True), (e4m3, False, True)]
    assert Counter(found) == Counter(expected)


def no_wgrad(call: Call) -> Support:
    return Support.no(Code.LAYOUT, "has no wgrad yet") if call.flags.get("layout") == "wgrad" else SUPPORTED


def test_a_missing_backward_kernel_is_found_before_anything_runs():
    counting = Counting(says=no_wgrad)
    te_hal.set_backend("counting")
    module = te.Linear(32, 48)
    with pytest.raises(NotImplementedError, match="has no wgrad yet"):
        module(torch.randn(16, 32))
    assert counting.launches == []


def test_a_listed_fallback_takes_the_missing_kernel_and_counts():
    counting = Counting(says=no_wgrad)
    te_hal.set_backend("counting")
    te_hal.set_policy(te_hal.Policy(fallback=("cpu_reference",)))
    module = te.Linear(32, 48)
    with pytest.warns(UserWarning, match="has no wgrad yet"):
        y = module(torch.randn(16, 32))
    y.sum().backward()
    assert counting.count("gemm") == 1  # the input needs no gradient
    assert torch.equal(module.weight.grad[0], module.weight.grad[1])
    assert "wgrad" not in {launch.layout for launch in counting.launches}


@pytest.mark.parametrize("name", RECIPES)
def test_backward_runs_on_the_backend_of_its_forward(name):
    counting, other = Counting("first"), Counting("second")
    module = te.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    with te_hal.use_backend("first"), te.autocast(enabled=name != "none", recipe=RECIPES[name]()):
        y = module(x, fp8_grad=True)
    forward = len(counting.launches)
    with te_hal.use_backend("second"):
        y.backward(torch.randn(16, 48))
    # The update of scaling states belongs to the region, not to the layer.
    assert {launch.op for launch in other.launches} <= {"update_delayed_scale"}
    assert counting.count("gemm") == 3
    assert len(counting.launches) > forward


def test_a_forward_on_null_has_a_backward_on_null():
    module, x = te.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with te_hal.use_backend("null"), te.autocast():
        y = module(x)
    counting = Counting()
    te_hal.set_backend("counting")
    y.sum().backward()
    assert counting.count("gemm") == 0
    assert module.weight.grad.shape == (48, 32)


def test_another_selection_makes_another_plan_and_the_old_one_comes_back():
    counting = Counting()
    module = te.Linear(32, 48)
    expected = module(torch.ones(16, 32))
    with te_hal.use_backend("counting"):
        assert torch.equal(module(torch.ones(16, 32)), expected)
        assert counting.count("gemm") == 1
    module(torch.ones(16, 32))
    assert counting.count("gemm") == 1
    te_hal.set_policy(te_hal.Policy(per_op={"gemm": "counting"}))
    module(torch.ones(16, 32))
    assert counting.count("gemm") == 2


def test_orders_of_two_backends_do_not_mix_in_one_graph():
    from te_hal.schema.formats import ColumnwiseOrder  # noqa: PLC0415 - for this test alone

    Counting("transposed", reads=COLUMNWISE_IN_BACKWARD)
    Counting("same", reads=COLUMNWISE_IN_BACKWARD, order=ColumnwiseOrder.SAME)
    module, chosen = te.Linear(32, 48), recipe.Float8CurrentScaling()
    x = torch.randn(16, 32, requires_grad=True)
    gradients = []
    for names in (("transposed", "same"), ("transposed", "transposed")):
        x.grad = None
        module.zero_grad()
        outputs = []
        for name in names:
            with te_hal.use_backend(name), te.autocast(recipe=chosen):
                outputs.append(module(x))
        torch.autograd.backward(outputs, [torch.ones(16, 48)] * 2)
        gradients.append([x.grad.clone(), module.weight.grad.clone()])
    assert all(map(torch.equal, *gradients))


def test_plans_stay_with_their_process_and_module():
    module = te.Linear(32, 48)
    module(torch.randn(16, 32))
    assert len(module._plans) == 1
    assert len(pickle.loads(pickle.dumps(module))._plans) == 0
    module.bfloat16()
    assert len(module._plans) == 0


def test_a_plan_says_what_it_was_made_for():
    module = te.Linear(32, 48)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        module(torch.randn(16, 32))
    (plan,) = module._plans
    assert plan.key.formats.grad_output.format.name == "E5M2"
    assert (plan.key.dgrad, plan.key.wgrad) == (False, True)
    assert plan.dgrad is None
