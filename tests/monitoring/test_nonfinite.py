"""The first NaN or Inf of a training is named: module, role, step and op."""

import math

import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.monitoring import NonFiniteError, NonFiniteWarning
from te_hal.schema.errors import TeHalError

RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "off": lambda: None}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 64), te.LayerNorm(64), torch.nn.GELU(), te.Linear(64, 32))


class Times(torch.autograd.Function):
    """Leaves a value as it is and puts ``factor`` onto one element of its gradient."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[1, 2] *= ctx.factor
        return gradient, None


def run(net, chosen, watch, steps=3, *, spoil=lambda _, x: (x, 1.0)):
    for step in range(1, steps + 1):
        x, factor = spoil(step, torch.randn(8, 32))
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = net(x)
        Times.apply(y, factor).sum().backward()
        watch.step()
        net.zero_grad()


def in_input(value):
    def spoil(step, x):
        if step == 2:
            x[3, 4] = value
        return x, 1.0

    return spoil


def in_gradient(step, x):
    return x, math.inf if step == 2 else 1.0


CASES = {
    "NaN in the input": (in_input(math.nan), {"module": "0", "kind": "Linear", "role": "input", "value": "NaN"}),
    "Inf in the input": (in_input(math.inf), {"module": "0", "kind": "Linear", "role": "input", "value": "Inf"}),
    "Inf in a gradient": (in_gradient, {"module": "3", "kind": "Linear", "role": "grad_output", "value": "Inf"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("every", [1, 100], ids=["recorded", "between two recorded steps"])
def test_raise_names_module_role_step_and_op_where_it_happens(name, case, every):
    spoil, expected = CASES[case]
    net = model()
    with te_hal.monitor(net, every=every, nonfinite="raise") as watch, pytest.raises(NonFiniteError) as raised:
        run(net, RECIPES[name](), watch, spoil=spoil)
    found = watch.nonfinite
    assert {key: found[key] for key in expected} == expected
    assert (found["step"], found["op"]) == (2, "gemm" if name == "off" else "quantize")
    assert found["direction"] == ("backward" if "gradient" in case else "forward")
    assert isinstance(raised.value, TeHalError)
    for fact in (found["module"], found["kind"], found["role"], found["op"], "in step 2", found["value"]):
        assert fact in str(raised.value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RECIPES)
def test_report_warns_once_and_keeps_the_same_facts(name, case):
    spoil, expected = CASES[case]
    net = model()
    with te_hal.monitor(net, every=100) as watch:
        with pytest.warns(NonFiniteWarning) as warned:
            run(net, RECIPES[name](), watch, spoil=spoil)
        run(net, RECIPES[name](), watch, spoil=in_input(math.nan))
    found = watch.history()["nonfinite"]
    assert {key: found[key] for key in expected} == expected
    assert found["step"] == 2
    assert len(warned) == 1
    assert found["role"] in str(warned[0].message)


def test_a_gemm_that_overflows_is_named_by_its_output():
    net = torch.nn.Sequential(te.Linear(32, 32))
    with torch.no_grad():
        net[0].weight.fill_(3e38)
    with te_hal.monitor(net, nonfinite="raise") as watch, pytest.raises(NonFiniteError):
        net(torch.ones(8, 32))
    assert [watch.nonfinite[key] for key in ("role", "op", "value")] == ["output", "gemm", "Inf"]


def test_modules_without_fp8_are_named_too():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 32), te.LayerNorm(32), te.Linear(32, 32))
    with torch.no_grad():
        net[1].weight[5] = math.nan
    with te_hal.monitor(net, nonfinite="raise") as watch, pytest.raises(NonFiniteError):
        net(torch.tensor([1, 2]))
    assert [watch.nonfinite[key] for key in ("module", "kind", "op")] == ["1", "LayerNorm", "layernorm"]


def test_a_weight_is_named_before_what_it_spoils():
    net = model()
    with torch.no_grad():
        net[3].weight[0, 0] = math.nan
    with te_hal.monitor(net, nonfinite="raise") as watch, pytest.raises(NonFiniteError), te.autocast():
        net(torch.randn(8, 32))
    assert [watch.nonfinite[key] for key in ("module", "role")] == ["3", "weight"]


def test_a_parameter_s_gradient_is_looked_at_when_the_step_ends():
    net = model()
    with te_hal.monitor(net, nonfinite="raise") as watch:
        net(torch.randn(8, 32)).sum().backward()
        net[0].bias.grad[3] = math.nan
        with pytest.raises(NonFiniteError, match="gradient of bias"):
            watch.step()


def test_ignore_looks_for_nothing():
    net = model()
    with te_hal.monitor(net, every=1, nonfinite="ignore") as watch:
        run(net, None, watch, spoil=in_input(math.nan))
    assert watch.nonfinite is None
    assert math.isnan(watch.history()["tensors"][0]["amax"][1])


def test_what_a_broken_off_step_has_shown_is_reported_on_close():
    net = model()
    watch = te_hal.monitor(net)
    net(torch.full((8, 32), math.nan))
    with pytest.warns(NonFiniteWarning):
        watch.close()
    assert watch.nonfinite["role"] == "input"
