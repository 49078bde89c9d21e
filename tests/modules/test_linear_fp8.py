"""Linear under FP8, against a float64 emulation made of ml_dtypes casts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import closeness
import ml_dtypes
import numpy as np
import pytest
import torch
from linear_emulation import (
    E4M3,
    E5M2,
    DelayedScale,
    Products,
    array,
    cast,
    current_scale,
    largest_magnitude,
    products,
    scale_for,
)

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

HYBRID, ALL_E4M3 = recipe.Format.HYBRID, recipe.Format.E4M3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: What fp32 sums and the rounding of a scale_inv may move, relative to the largest result; one rounding comes on top.
FP32_ERROR = 5e-6


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Same NaN, and every other element within one rounding."""
    rows, nan = result.detach().reshape(exact.shape), exact.isnan()
    numbers = exact.masked_fill(nan, 0)
    error = FP32_ERROR * numbers.abs().max()
    return torch.equal(rows.isnan(), nan) and closeness.roundings(rows.masked_fill(nan, 0), numbers, error) <= 1


def step(module: te.Linear, x: torch.Tensor, gy: torch.Tensor, chosen: recipe.Recipe) -> list[torch.Tensor]:
    """y, gx, gw, gb of the module."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(recipe=chosen):
        y = module(x)
    y.backward(gy)
    return [y, x.grad, module.weight.grad, module.bias.grad]


def emulated(
    module: te.Linear, x: torch.Tensor, gy: torch.Tensor, quantize: Callable[[str, npt.NDArray], npt.NDArray]
) -> Products:
    rows, weight, grads = array(x), array(module.weight), array(gy)
    return products(quantize("x", rows), quantize("w", weight), module.bias, grads, quantize("gy", grads))


def made(dtype: torch.dtype, bias: float = 1.0) -> te.Linear:
    module = te.Linear(32, 48, params_dtype=dtype)
    torch.nn.init.constant_(module.bias, bias / 3)
    return module


def rounded_down(scale: np.float32) -> np.float32:
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))


CURRENT = {
    "hybrid": (recipe.Float8CurrentScaling(), E5M2, lambda scale: scale),
    "e4m3": (recipe.Float8CurrentScaling(fp8_format=ALL_E4M3), E4M3, lambda scale: scale),
    "power_of_2": (recipe.Float8CurrentScaling(use_power_2_scales=True), E5M2, rounded_down),
}


@pytest.mark.parametrize("name", CURRENT)
@pytest.mark.parametrize("shape", [(16, 32), (2, 4, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_current_scaling_multiplies_what_the_casts_give(dtype, shape, name):
    chosen, backward, adapt = CURRENT[name]
    module = made(dtype)
    x, gy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 48, dtype=dtype)

    def quantize(role: str, values: npt.NDArray) -> npt.NDArray:
        code = backward if role == "gy" else E4M3
        return cast(values, adapt(current_scale(values, code)), code)

    exact = emulated(module, x, gy, quantize)
    found = step(module, x, gy, chosen)
    assert [value.dtype for value in found] == [dtype] * 4
    assert all(map(close, found, exact))
    unquantized = torch.from_numpy(array(x).astype(np.float64) @ array(module.weight).T) + module.bias.double()
    assert closeness.relative_error(exact.y, unquantized) > 1e-3


DELAYED = {
    "hybrid": (recipe.DelayedScaling(amax_history_len=3), E5M2),
    "e4m3_margin": (recipe.DelayedScaling(amax_history_len=3, margin=2, fp8_format=ALL_E4M3), E4M3),
}


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_delayed_scaling_multiplies_what_casts_with_the_scales_of_earlier_steps_give(dtype, name):
    chosen, backward = DELAYED[name]
    module = made(dtype)
    scales = {
        role: DelayedScale(backward if role == "gy" else E4M3, chosen.amax_history_len, chosen.margin)
        for role in ("x", "w", "gy")
    }
    for size in (1.0, 8.0, 0.25, 2.0, 0.5):
        x, gy = torch.randn(16, 32, dtype=dtype) * size, torch.randn(16, 48, dtype=dtype) * size

        def quantize(role: str, values: npt.NDArray) -> npt.NDArray:
            return cast(values, scales[role].scale, scales[role].code)

        exact = emulated(module, x, gy, quantize)
        assert all(map(close, step(module, x, gy, chosen), exact))
        for role, tensor in (("x", x), ("w", module.weight), ("gy", gy)):
            scales[role].update(largest_magnitude(array(tensor)))


RECIPES = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=2), "current": recipe.Float8CurrentScaling}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("what", ["zero_input", "zero_row", "zero_weight", "zero_gradient"])
def test_zeros_stay_zero_and_everything_stays_finite(what, name):
    chosen, module = RECIPES[name](), made(torch.bfloat16, bias=0.0)
    x, gy = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        {"zero_input": x, "zero_row": x[3], "zero_weight": module.weight, "zero_gradient": gy}[what].zero_()
    for _ in range(3):
        y, gx, gw, gb = step(module, x, gy, chosen)
        assert all(value.isfinite().all() for value in (y, gx, gw, gb))
        zeros = {"zero_input": (y, gw), "zero_row": (y[3],), "zero_weight": (y, gx), "zero_gradient": (gx, gw, gb)}
        assert not any(value.any() for value in zeros[what])
    if what == "zero_weight" and name == "delayed":
        assert module.fp8_meta["scaling_fwd"].scale[1] == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("where", ["x", "w", "gy"])
def test_a_nan_or_infinity_gives_what_the_rules_of_casts_say(where, value):
    module = made(torch.bfloat16)
    x, gy = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        {"x": x, "w": module.weight, "gy": gy}[where][2, 5] = value

    def quantize(role: str, values: npt.NDArray) -> npt.NDArray:
        code = E5M2 if role == "gy" else E4M3
        return cast(values, current_scale(values, code), code)

    exact = emulated(module, x, gy, quantize)
    y, gx, gw, gb = step(module, x, gy, recipe.Float8CurrentScaling())
    assert all(map(close, (y, gx, gw), exact[:3]))
    assert torch.equal(gb.double().nan_to_num(9.0, 9.0, 9.0), exact.gb.bfloat16().double().nan_to_num(9.0, 9.0, 9.0))


def test_an_infinity_under_delayed_scaling_saturates_and_holds_the_scale():
    module, chosen = made(torch.bfloat16), RECIPES["delayed"]()
    x, gy = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    step(module, x, gy, chosen)
    scale = module.fp8_meta["scaling_fwd"].scale.clone()
    assert scale[0] == scale_for(largest_magnitude(array(x)), E4M3)
    x[2, 5] = float("inf")
    y, *_ = step(module, x, gy, chosen)
    assert y.isfinite().all()
    assert module.fp8_meta["scaling_fwd"].scale[0] == scale[0]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30], ids=str)
def test_inputs_of_extreme_size_keep_their_precision_under_current_scaling(scale):
    module = made(torch.float32, bias=0.0)
    x = torch.randn(16, 32) * scale
    y, *_ = step(module, x, torch.randn(16, 48), recipe.Float8CurrentScaling())
    codes = cast(array(x), current_scale(array(x), E4M3), E4M3)
    weight = cast(array(module.weight), current_scale(array(module.weight), E4M3), E4M3)
    assert close(y, torch.from_numpy(codes @ weight.T))


def test_only_the_recipe_in_force_decides_whether_a_step_is_quantized():
    module, x = made(torch.float32), torch.randn(16, 32)
    plain = module(x)
    with te.autocast(recipe=RECIPES["delayed"]()):
        inside = module(x)
        with te.autocast(enabled=False):
            off = module(x)
        again = module(x)
    assert torch.equal(off, plain)
    assert torch.equal(inside, again)
    assert not torch.equal(inside, plain)
    assert torch.equal(module(x), plain)
    assert not module.fp8


def test_an_exception_inside_leaves_the_module_as_it_was_outside():
    module, x = made(torch.float32), torch.randn(16, 32)
    plain = module(x)
    with pytest.raises(ValueError, match="divisible"), te.autocast(recipe=RECIPES["current"]()):
        module(x[:3])
    assert torch.equal(module(x), plain)


def test_two_recipes_in_turn_keep_a_state_each():
    module = made(torch.bfloat16)
    delayed, current = RECIPES["delayed"](), RECIPES["current"]()
    x, gy = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    with te.autocast(recipe=delayed):
        first = module(x)
    with te.autocast(recipe=current):
        second = module(x)
    (first + second).backward(gy)
    with te.autocast(recipe=delayed):
        module(x)
    state = module.fp8_meta["scaling_bwd"]
    assert state.amax_history[-1, 0] == float(largest_magnitude(array(gy)))
    assert state.scale[0] == scale_for(largest_magnitude(array(gy)), E5M2)


@pytest.mark.parametrize("length", [1, 4])
def test_a_changed_margin_takes_the_scales_along(length):
    module = made(torch.bfloat16)
    x, gy = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    step(module, x, gy, recipe.DelayedScaling(amax_history_len=length))
    before = module.fp8_meta["scaling_fwd"].scale.clone()
    with torch.no_grad(), te.autocast(recipe=recipe.DelayedScaling(amax_history_len=length, margin=3)):
        module(x)
    after = module.fp8_meta["scaling_fwd"].scale
    assert torch.equal(after[:2], before[:2] / 8)
    assert after[2] == 1.0  # the output slot has recorded nothing


def test_ml_dtypes_and_torch_mean_the_same_codes():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for code, dtype in ((ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn), (ml_dtypes.float8_e5m2, torch.float8_e5m2)):
        theirs = torch.from_numpy(every.numpy().view(code).astype(np.float32))
        assert torch.equal(theirs.nan_to_num(7.0), every.view(dtype).float().nan_to_num(7.0))
