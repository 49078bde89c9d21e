"""autocast(enabled=False, calibrating=True): high-precision results, and amaxes for the updates to come."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_linear import RECIPES, data, high_precision, linear, newest, running

import te_hal.modules as te
from te_hal.recipe import Float8CurrentScaling

MANAGER = te.FP8GlobalStateManager


@pytest.mark.parametrize("name", RECIPES)
def test_calibrating_gives_exactly_the_high_precision_output(name):
    module, x = linear(), data().requires_grad_()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES[name]()):
        y = module(x)
    assert torch.equal(y, high_precision(module, x))
    assert module.fp8_calibration
    assert not module.fp8
    y.sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(16, 32).t() @ x)


def test_calibrating_records_the_largest_magnitude():
    module = linear()
    x = torch.full((16, 32), -5.0)
    x[0, 0] = 0.1
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        module(x)
        module(torch.ones(16, 32))
    assert running(module) == [5.0, module.weight.abs().max().item(), 0.0]
    assert module.fp8_meta["scaling_fwd"].scale.tolist() == [1.0] * 3


def test_the_next_enabled_blocks_update_takes_calibration_up():
    module = linear()
    for _ in range(2):
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
            module(torch.full((16, 32), -5.0))
    with te.autocast(recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), 0.5))
    assert newest(module)[0] == 5.0
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == np.float32(448) / np.float32(5)
    with te.autocast(recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), 0.5))
    assert module.fp8_meta["scaling_fwd"].amax_history[-2:, 0].tolist() == [5.0, 0.5]


def test_enabled_wins_over_calibrating():
    module, x = linear(), data()
    with te.autocast(enabled=True, calibrating=True, recipe=Float8CurrentScaling()):
        assert not MANAGER.is_fp8_calibration()
        y = module(x)
    assert not torch.equal(y, high_precision(module, x))


def test_calibration_is_saved_with_the_module():
    module = linear()
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        module(torch.full((16, 32), -5.0))
    again = linear()
    again.load_state_dict(module.state_dict())
    assert running(again)[0] == 5.0
