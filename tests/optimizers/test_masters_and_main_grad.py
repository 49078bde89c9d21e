"""What stands beside a parameter: its master after something else wrote to it, and a main_grad that no step reads."""

from __future__ import annotations

import warnings

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import ArgumentError

BF16 = torch.bfloat16
MASTERS = {
    "fp32": lambda ps: te.optimizers.FusedAdam(ps, lr=1e-6, master_weights=True),
    "fp16": lambda ps: te.optimizers.FusedAdam(ps, lr=1e-6, master_weights=True, master_weight_dtype=torch.float16),
    "remainders": lambda ps: te.optimizers.FusedAdam(ps, lr=1e-6, master_weights=True, store_param_remainders=True),
    "sgd": lambda ps: te.optimizers.FusedSGD(ps, 1e-8, master_weights=True),
}
OPTIMIZERS = {
    "FusedAdam": lambda ps: te.optimizers.FusedAdam(ps, lr=0.1),
    "FusedSGD": lambda ps: te.optimizers.FusedSGD(ps, 0.1),
}


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(8, 32, dtype=BF16)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", MASTERS)
def test_weights_loaded_after_a_step_stay_once_masters_are_refreshed(name, some):
    module = te.Linear(32, 32, params_dtype=BF16)
    optimizer = MASTERS[name](module.parameters())
    step(module, optimizer)
    loaded = torch.randn(32, 32).to(BF16)
    module.load_state_dict({"weight": loaded, "bias": torch.zeros(32)})
    optimizer.refresh_master_weights([module.weight] if some else None)
    assert torch.equal(optimizer.get_unscaled_state(module.weight, "master_param").to(BF16), loaded) or name == "fp16"
    step(module, optimizer)
    # fp16 masters hold 11 bits below the largest; a step of 1e-6 moves no bf16 but those near a tie.
    assert (module.weight - loaded).abs().max() <= (2**-7 if name == "fp16" else 2**-9) * loaded.abs().max()


def test_refreshed_masters_of_fp8_weights_are_what_the_codes_stand_for():
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        module = te.Linear(32, 32)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-3, master_weights=True)
    with pytest.warns(UserWarning, match="outside of autocast"):
        module(torch.ones(8, 32)).sum().backward()
    optimizer.step()
    module.load_state_dict({"weight": torch.randn(32, 32), "bias": torch.zeros(32)})
    optimizer.refresh_master_weights()
    assert torch.equal(optimizer.get_unscaled_state(module.weight, "master_param"), module.weight.dequantize())


def test_refreshing_before_a_step_makes_no_state_and_a_stranger_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = MASTERS["fp32"]([parameter])
    optimizer.refresh_master_weights()
    assert not optimizer.state
    with pytest.raises(ArgumentError, match=r"FusedAdam\.refresh_master_weights: params"):
        optimizer.refresh_master_weights([torch.nn.Parameter(torch.ones(3))])


def fused(*, flagged: bool) -> torch.nn.Module:
    module = te.Linear(32, 32, params_dtype=BF16, bias=False, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(32, 32)
    if flagged:
        module.weight.grad_added_to_main_grad = False
    return module


@pytest.mark.parametrize("flagged", [False, True], ids=["no grad", "zeros in grad"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_main_grad_that_the_step_passes_over_is_told_once_by_the_parameters_name(name, flagged):
    module = fused(flagged=flagged)
    optimizer, before = OPTIMIZERS[name](module.named_parameters()), module.weight.detach().clone()
    with pytest.warns(UserWarning, match=rf"{name}\.step: got a gradient in main_grad.*weight \(shape \(32, 32\)\)"):
        step(module, optimizer)
    assert torch.equal(module.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, optimizer)


@pytest.mark.parametrize("flagged", [False, True])
def test_handed_over_main_grad_trains_as_a_plain_layers_gradient(flagged):
    module, plain = fused(flagged=flagged), te.Linear(32, 32, params_dtype=BF16, bias=False)
    plain.load_state_dict(module.state_dict())
    one = te.optimizers.FusedAdam(module.parameters(), lr=0.1, use_decoupled_grad=True)
    other = te.optimizers.FusedAdam(plain.parameters(), lr=0.1)
    module(torch.ones(8, 32, dtype=BF16)).sum().backward()
    module.weight.decoupled_grad = module.weight.main_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.step()
    step(plain, other)
    assert torch.equal(module.weight, plain.weight)


def test_a_main_grad_of_zeros_is_nobodys_loss():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.main_grad = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OPTIMIZERS["FusedAdam"]([parameter]).step()
