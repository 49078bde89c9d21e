"""torch.autocast over fp32 parameters, against the same run with inputs and weights cast by hand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from linear_emulation import E4M3, E5M2, array, cast, current_scale

import te_hal.modules as te
from te_hal import recipe

BF16, FP16 = torch.bfloat16, torch.float16
RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling,
}
MICROBATCHES = 3


def data(dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs in fp32 and output gradients in ``dtype``."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 32, generator=generator), torch.randn(16, 48, generator=generator).to(dtype))
        for _ in range(MICROBATCHES)
    ]


def under_autocast(module: te.Linear, chosen, dtype: torch.dtype, *, backward_inside: bool) -> list[torch.Tensor]:
    """Every output and input gradient, and the parameters' gradients accumulated over the microbatches."""
    results = []
    for index, (x, gy) in enumerate(data(dtype)):
        x.requires_grad_()
        with torch.autocast("cpu", dtype), te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x, is_first_microbatch=index == 0)
        with torch.autocast("cpu", dtype) if backward_inside else nullcontext():
            y.backward(gy)
        results += [y, x.grad]
    return [*results, module.weight.grad, module.bias.grad]


def by_hand(module: te.Linear, chosen, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same with a module in ``dtype``; gradients are added up in fp32."""
    cast_module = te.Linear(32, 48, params_dtype=dtype)
    with torch.no_grad():
        cast_module.weight.copy_(module.weight)
        cast_module.bias.copy_(module.bias)
    results, sums = [], [torch.zeros(48, 32), torch.zeros(48)]
    for index, (x, gy) in enumerate(data(dtype)):
        cast_module.zero_grad()
        narrow = x.to(dtype).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = cast_module(narrow, is_first_microbatch=index == 0)
        y.backward(gy)
        results += [y, narrow.grad.float()]
        for total, parameter in zip(sums, (cast_module.weight, cast_module.bias), strict=True):
            total.add_(parameter.grad.float())
    return [*results, *sums]


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_results_equal_those_of_inputs_and_weights_cast_by_hand(name, dtype, backward_inside):
    module = te.Linear(32, 48)
    torch.nn.init.normal_(module.bias)
    found = under_autocast(module, RECIPES[name](), dtype, backward_inside=backward_inside)
    expected = by_hand(module, RECIPES[name](), dtype)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert found[0].dtype == dtype
    assert found[1].dtype == found[-1].dtype == torch.float32
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", RECIPES)
def test_main_grad_takes_the_fp32_sum_also_when_the_backward_runs_inside_autocast(name):
    chosen, module = RECIPES[name](), te.Linear(32, 48, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(48, 32)
    (x, gy), *_ = data(BF16)
    with torch.autocast("cpu", BF16), te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x)
        y.backward(gy)
    rows, grads = array(x.bfloat16()).astype(float), array(gy).astype(float)
    if name == "current":
        rows, grads = (
            cast(array(v), current_scale(array(v), code), code) for v, code in ((x.bfloat16(), E4M3), (gy, E5M2))
        )
    if name == "delayed":
        rows, grads = (cast(array(v), 1.0, code) for v, code in ((x.bfloat16(), E4M3), (gy, E5M2)))
    exact = torch.from_numpy(grads.T @ rows)
    assert module.weight.grad is None
    assert (module.weight.main_grad.double() - exact).norm() <= 3e-6 * exact.norm()


def test_autocast_that_is_off_for_this_device_or_switched_off_inside_changes_nothing():
    module, x = te.Linear(32, 48), torch.randn(16, 32)
    plain = module(x)
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        assert torch.equal(module(x), plain)
    with torch.autocast("cuda", BF16, enabled=False):
        assert torch.equal(module(x), plain)


def test_mixed_dtypes_without_autocast_are_refused_with_the_three_ways_out():
    module = te.Linear(32, 48, name="proj")
    with pytest.raises(ValueError, match=r"'proj'.*input of torch.bfloat16, weight of torch.float32") as caught:
        module(torch.randn(16, 32, dtype=BF16))
    for way in ("cast the input", "params_dtype=torch.bfloat16", "torch.autocast"):
        assert way in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "torch_autocast"])
def test_an_input_that_is_no_activation_is_refused_instead_of_being_cast(dtype, autocast):
    module, x = te.Linear(32, 48), torch.ones(16, 32).to(dtype)
    with torch.autocast("cpu", BF16, enabled=autocast), pytest.raises(ValueError, match=f"input of {dtype}"):
        module(x)


@pytest.mark.parametrize("kind", [te.LayerNorm, te.RMSNorm])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norms_equal_those_of_inputs_and_weights_cast_by_hand(kind, dtype):
    module, narrow = kind(32), kind(32, dtype=dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        for own, other in zip(narrow.parameters(), module.parameters(), strict=True):
            own.copy_(other)
    x, gy = torch.randn(4, 32), torch.randn(4, 32, dtype=dtype)
    x.requires_grad_()
    with torch.autocast("cpu", dtype):
        y = module(x)
        y.backward(gy)
    x_narrow = x.detach().to(dtype).requires_grad_()
    expected = narrow(x_narrow)
    expected.backward(gy)
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, x_narrow.grad.float())
    for own, other in zip(narrow.parameters(), module.parameters(), strict=True):
        assert torch.equal(other.grad, own.grad.float())
