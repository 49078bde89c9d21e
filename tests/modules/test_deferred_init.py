"""Modules made on meta: reset_parameters gives their parameters memory and values."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal.recipe import MXFP8BlockScaling

MODULES = {
    "LayerNorm": lambda **given: te.LayerNorm(64, **given),
    "RMSNorm": lambda **given: te.RMSNorm(64, **given),
    "Linear": lambda **given: te.Linear(64, 96, **given),
    "LayerNormLinear": lambda **given: te.LayerNormLinear(64, 96, **given),
    "LayerNormMLP": lambda **given: te.LayerNormMLP(64, 96, **given),
    "GroupedLinear": lambda **given: te.GroupedLinear(2, 64, 96, **given),
    "ops.BasicLinear": lambda **given: te.ops.BasicLinear(64, 96, **given),
    "ops.Bias": lambda **given: te.ops.Bias(64, **given),
}


@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_gives_what_a_module_made_there_has(name):
    module = MODULES[name](device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    expected = MODULES[name](device="cpu")
    found = dict(module.named_parameters())
    for key, parameter in expected.named_parameters():
        assert (found[key].device.type, type(found[key])) == ("cpu", torch.nn.Parameter)
        assert torch.equal(found[key], parameter)


def test_quantized_weights_are_made_with_their_codes():
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        module = te.Linear(64, 96, device="meta")
        torch.manual_seed(0)
        module.reset_parameters()
        torch.manual_seed(0)
        expected = te.Linear(64, 96, device="cpu")
    assert torch.equal(module.weight._rowwise_data, expected.weight._rowwise_data)


@pytest.mark.parametrize("how", ["defer_init", "default device"])
def test_parameters_wait_where_they_are_told_to(how):
    module = te.Linear(64, 96, device="meta")
    if how == "defer_init":
        module.reset_parameters(defer_init=True)
    else:
        with torch.device("meta"):
            module.reset_parameters()
    assert module.weight.is_meta


def test_a_module_that_is_real_stays_where_it_is_and_keeps_its_parameters():
    module = te.Linear(64, 96)
    weight = module.weight
    module.reset_parameters()
    assert module.weight is weight


def test_a_subclass_may_leave_the_argument_out():
    class Zeros(te.Linear):
        def reset_parameters(self):
            with torch.no_grad():
                self.weight.zero_()

    assert not Zeros(8, 8, bias=False).weight.any()
