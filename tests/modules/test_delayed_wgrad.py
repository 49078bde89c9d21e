"""Weight gradients that a backward leaves to backward_dw: the same bytes, later."""

from __future__ import annotations

import copy

import pytest
import torch
from counting_backend import Counting
from recomputed_stack import same

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import StateError

RECIPES = {
    "plain": None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}
BF16 = torch.bfloat16
KINDS = {
    "Linear": lambda **given: te.Linear(32, 32, **given),
    "parts": lambda **given: te.Linear(32, 96, parameters_split={"query": 64, "value": 32}, **given),
    "LayerNormLinear": lambda **given: te.LayerNormLinear(32, 32, **given),
    "LayerNormMLP": lambda **given: te.LayerNormMLP(32, 64, **given),
    "GroupedLinear": lambda **given: te.GroupedLinear(3, 32, 32, **given),
    "stacked": lambda **given: te.GroupedLinear(3, 32, 32, single_grouped_weight=True, **given),
}


def made(kind: str, *, fuses: bool = False, dtype: torch.dtype = BF16, **given) -> torch.nn.Module:
    torch.manual_seed(0)
    module = KINDS[kind](params_dtype=dtype, fuse_wgrad_accumulation=fuses, **given)
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, 3.0)
    return module


def call(module: torch.nn.Module, x: torch.Tensor, **given) -> torch.Tensor:
    return module(x, [32, 0, 32], **given) if isinstance(module, te.GroupedLinear) else module(x, **given)


def step(module: torch.nn.Module, name: str, number: int, **given) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    dtype = next(module.parameters()).dtype
    x = torch.randn(64, 32, generator=generator).to(dtype).requires_grad_()
    chosen = RECIPES[name]
    with te.autocast(enabled=chosen is not None, recipe=chosen() if chosen else None):
        y = call(module, x, **given)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    return [y.detach(), x.grad]


def grads(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [(p.grad, p.main_grad) for p in module.parameters()]
    return [grad for pair in found for grad in pair if grad is not None]


#: main_grad is for one weight, which parts are not.
FUSES = [(kind, fuses) for kind in KINDS for fuses in (False, True) if not (kind == "parts" and fuses)]


@pytest.mark.parametrize(("kind", "fuses"), FUSES)
@pytest.mark.parametrize("name", RECIPES)
def test_two_rounds_add_up_to_the_gradients_of_two_backwards(name, kind, fuses):
    """Case B52."""
    plain, late = made(kind, fuses=fuses), made(kind, fuses=fuses, delay_wgrad_compute=True)
    for number, flag in enumerate((True, False)):
        found = step(plain, name, number, is_first_microbatch=flag)
        assert same(found, step(late, name, number, is_first_microbatch=flag))
        late.backward_dw()
    assert same(grads(plain), grads(late))
    assert torch.equal(plain.get_extra_state(), late.get_extra_state())


@pytest.mark.parametrize("name", ["plain", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_backwards_may_wait_and_the_oldest_comes_first(name, kind):
    plain, late = made(kind), made(kind, delay_wgrad_compute=True)
    after_one = None
    for number in range(3):
        step(plain, name, number)
        step(late, name, number)
        if number == 0:
            after_one = [grad.clone() for grad in grads(plain)]
    weights = [p for p in late.parameters() if p.dim() > 1]
    assert all(weight.grad is None for weight in weights)
    late.backward_dw()
    firsts = [p.grad for p in late.parameters() if p.dim() > 1]
    expected = [grad for grad, p in zip(after_one[::2], plain.parameters(), strict=True) if p.dim() > 1]
    assert same(firsts, expected)
    late.backward_dw()
    late.backward_dw()
    assert same(grads(plain), grads(late))


def test_the_backward_runs_no_weight_gradient_and_backward_dw_nothing_else():
    counting, module = Counting(), made("LayerNormMLP", delay_wgrad_compute=True)
    with te_hal.use_backend("counting"):
        step(module, "current", 0)
    assert (counting.count("gemm", "dgrad"), counting.count("gemm", "wgrad")) == (2, 0)
    counting.launches.clear()
    module.backward_dw()
    assert [launch.layout for launch in counting.launches] == ["wgrad", "wgrad"]
    assert counting.launches[0].result.shape == (32, 64)  # fc2, then fc1


def test_gradients_come_in_the_dtype_of_the_parameter_inside_torch_autocast():
    found = []
    for delays in (False, True):
        module = made("Linear", dtype=torch.float32, delay_wgrad_compute=delays)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", BF16):
            y = module(x)
        y.float().square().sum().backward()
        module.backward_dw()
        found.append([module.weight.grad, module.bias.grad])
    assert found[1][0].dtype == torch.float32
    assert same(*found)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["plain", "delayed", "current"])
def test_it_goes_with_recompute(name, reentrant):
    plain, late, chosen = made("LayerNormMLP"), made("LayerNormMLP", delay_wgrad_compute=True), RECIPES[name]
    for module in (plain, late):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen() if chosen else None):
            y = module(x) if module is plain else te.checkpoint(module, x, use_reentrant=reentrant)
        y.float().square().sum().backward()
        module.backward_dw()
    assert same(grads(plain), grads(late))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_weights_that_live_in_fp8_get_theirs(name):
    found = []
    for delays in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=RECIPES[name]()):
            module = te.Linear(32, 32, params_dtype=BF16, delay_wgrad_compute=delays)
        for number in range(2):
            step(module, name, number)
            module.backward_dw()
        found.append([module.weight.grad, module.bias.grad])
    assert same(*found)


def test_a_frozen_weight_has_nothing_to_wait_for():
    module = made("LayerNormMLP", delay_wgrad_compute=True)
    module.fc1_weight.requires_grad_(False)
    step(module, "delayed", 0)
    module.backward_dw()
    assert module.fc1_weight.grad is None
    assert module.fc2_weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_weights_are_all_frozen_gets_no_gradient_and_no_error(kind):
    module, seen = made(kind, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(1))
    weights = [p for p in module.parameters() if p.dim() > 1]
    for weight in weights:
        weight.requires_grad_(False)
    step(module, "delayed", 0)
    biases = [p.grad.clone() for p in module.parameters() if p.requires_grad]
    module.backward_dw()
    assert seen == []
    assert all(weight.grad is None for weight in weights)
    assert same(biases, [p.grad for p in module.parameters() if p.requires_grad])
    for weight in weights:
        weight.requires_grad_(True)
    step(module, "delayed", 1)
    module.backward_dw()
    assert seen == [1]
    assert all(weight.grad is not None for weight in weights)


def test_a_backward_without_any_that_waits_is_told():
    module = te.Linear(32, 32, delay_wgrad_compute=True, name="last")
    with pytest.raises(StateError, match=r"'last'.*backward_dw: got a call with no backward that waits"):
        module.backward_dw()


def test_a_module_that_delays_nothing_has_nothing_to_do():
    module = te.Linear(32, 32)
    assert not module.need_backward_dw()
    step(module, "plain", 0)
    before = module.weight.grad.clone()
    module.backward_dw()
    assert torch.equal(module.weight.grad, before)


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_an_operand_that_was_written_to_in_between_is_told(which):
    module = made("Linear", delay_wgrad_compute=True)
    x, gy = torch.randn(64, 32).to(BF16), torch.randn(64, 32).to(BF16)
    module(x).backward(gy)
    (x if which == "input" else gy).add_(1)
    with pytest.raises(StateError, match="written to in place since its backward"):
        module.backward_dw()


def test_hooks_of_frameworks_run_after_it_and_parameters_say_that_it_comes():
    module, seen = te.Linear(32, 32, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad is not None))
    step(module, "plain", 0)
    assert seen == []
    module.backward_dw()
    assert seen == [True]
    assert module.need_backward_dw()
    assert module.weight.skip_backward_post_hook
    assert not hasattr(module.bias, "skip_backward_post_hook")
    with pytest.raises(ValueError, match="register_wgrad_accumulation_and_reduce_hooks: got 3"):
        module.register_wgrad_accumulation_and_reduce_hooks(3)


def test_a_copy_of_the_module_has_nothing_that_waits():
    module = made("Linear", delay_wgrad_compute=True)
    step(module, "plain", 0)
    with pytest.raises(StateError):
        copy.deepcopy(module).backward_dw()
    module.backward_dw()


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_without_rows_wait_too_so_that_each_call_belongs_to_one_backward(stacked, fuses):
    kind, splits = "stacked" if stacked else "GroupedLinear", ([32, 0, 32], [0, 64, 0], [32, 32, 0])
    plain, late = made(kind, fuses=fuses), made(kind, fuses=fuses, delay_wgrad_compute=True)
    expected = []
    for number, sizes in enumerate(splits):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number)).to(BF16)
        for module in (plain, late):
            module(x, sizes).float().square().sum().backward()
        expected.append([grad.clone() for grad in grads(plain)])
    weights = [index for index, grad in enumerate(expected[0]) if grad.dim() > 1]
    for after in expected:
        late.backward_dw()
        found = grads(late)
        assert same([found[index] for index in weights], [after[index] for index in weights])
