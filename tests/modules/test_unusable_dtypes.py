"""Dtypes that no kernel takes: told before anything else, with every operand that has one, and what to cast."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError

MODULES = {
    "Linear": lambda: te.Linear(32, 32, name="proj"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32),
}
EACH = pytest.mark.parametrize("kind", MODULES)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "fp8"])
@EACH
def test_an_inputs_dtype_is_told_before_its_sizes(kind, enabled, dtype):
    with pytest.raises(ArgumentError) as caught, te.autocast(enabled=enabled):
        MODULES[kind]()(torch.ones(4, 32).to(dtype))
    assert str(caught.value).startswith(kind)
    assert f"got input of {dtype}; accepted: torch.float32, " in str(caught.value)
    assert "cast it: .to(torch.float32)" in str(caught.value)


@EACH
def test_the_dtype_to_cast_to_is_the_parameters(kind):
    with pytest.raises(ArgumentError, match=r"cast it: \.to\(torch\.bfloat16\)"):
        MODULES[kind]().bfloat16()(torch.ones(8, 32, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", [*MODULES, "LayerNorm"])
def test_a_model_of_float64_is_told_its_parameters_and_to_cast_itself(kind, enabled, dtype):
    module = (te.LayerNorm(32) if kind == "LayerNorm" else MODULES[kind]()).double()
    with pytest.raises(ArgumentError) as caught, te.autocast(enabled=enabled):
        module(torch.ones(8, 32, dtype=dtype))
    names = [name for name, _ in module.named_parameters()]
    operands = ["input", *names] if dtype is torch.float64 else names
    for name in operands:
        assert name in str(caught.value)
    assert "cast the model and its input: .to(torch.float32)" in str(caught.value)


@EACH
def test_fp8_weights_refuse_a_cast_to_float64_with_the_layers_name_and_stay(kind):
    with te.quantized_model_init():
        module = MODULES[kind]()
    before = {name: parameter.dtype for name, parameter in module.named_parameters()}
    with pytest.raises(ArgumentError, match=rf"^{kind}.*weight: got a cast of this weight.*torch\.float64"):
        module.double()
    assert {name: parameter.dtype for name, parameter in module.named_parameters()} == before
    assert module.half() is module
