"""Float8CurrentScalingQuantizer: scales against float64 and numpy, zero and special inputs, refused arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fp8_codes import codes_of

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema import formats
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
E4M3 = torch.float8_e4m3fn
FLOAT32_MAX = float(np.finfo(np.float32).max)


def scale_for(amax: float, largest: float, *, power_of_2: bool = False, epsilon: float = 0.0) -> float:
    """The rules S1 to S4 in numpy."""
    amax = max(amax, epsilon)
    if amax == 0 or math.isinf(amax):
        return 1.0
    with np.errstate(over="ignore"):
        scale = min(float(np.float32(largest) / np.float32(amax)), FLOAT32_MAX)
    return 2.0 ** (math.frexp(scale)[1] - 1) if power_of_2 else scale


AMAXES = [0.0, 1e-45, 1e-38, 1e-5, 0.7, 3.0, 448.0, 1e20, 3e38, float("inf")]


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("settings", [{}, {"force_pow_2_scales": True}, {"amax_epsilon": 0.01}], ids=str)
def test_scale_and_codes_come_from_the_tensors_own_amax(format, amax, settings):
    torch.manual_seed(2)
    fmt = FORMATS[format]
    x = torch.rand(16, 24) * (0.0 if math.isinf(amax) else amax)
    x[3, 5] = -amax
    q = te.Float8CurrentScalingQuantizer(fmt.dtype, **settings)(x)
    scale = scale_for(
        float(np.float32(amax)),
        fmt.max,
        power_of_2=settings.get("force_pow_2_scales", False),
        epsilon=settings.get("amax_epsilon", 0.0),
    )
    with np.errstate(over="ignore", divide="ignore"):
        assert q._scale_inv.item() == np.float32(1) / np.float32(scale)
    codes = torch.from_numpy(codes_of(x.numpy(), fmt, scale))
    assert torch.equal(q._data, codes)
    assert torch.equal(q._transpose, codes.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_value_becomes_the_largest_code_in_every_dtype(dtype):
    x = torch.tensor([-0.3, 0.1, 0.2], dtype=dtype)
    q = te.Float8CurrentScalingQuantizer(E4M3)(x)
    assert q._data[0].item() == 0xFE
    assert q.dtype == dtype
    assert (q.dequantize(dtype=torch.float32) - x.float()).abs().max() <= 0.3 * 2**-4


@pytest.mark.parametrize("shape", [(8, 16), (0,), (0, 16), ()], ids=str)
def test_zeros_stay_zero_with_scale_1(shape):
    q = te.Float8CurrentScalingQuantizer(E4M3)(torch.zeros(shape))
    assert q._scale_inv.item() == 1.0
    assert q.shape == shape
    assert not q.dequantize().any()
    assert not q._data.any()


def test_a_zero_row_stays_zero():
    x = torch.randn(8, 16)
    x[3] = 0.0
    q = te.Float8CurrentScalingQuantizer(E4M3)(x)
    assert not q.dequantize()[3].any()
    assert q.dequantize().isfinite().all()


def test_nan_is_left_out_of_the_scale_and_stays_in_place():
    x = torch.tensor([float("nan"), -2.0, 1.0])
    q = te.Float8CurrentScalingQuantizer(E4M3)(x)
    assert q._data.tolist() == [0x7F, 0xFE, 0x76]
    assert q._scale_inv.item() == np.float32(1) / np.float32(224)
    nothing_else = te.Float8CurrentScalingQuantizer(E4M3)(torch.full((4,), float("nan")))
    assert nothing_else._scale_inv.item() == 1.0
    assert nothing_else.dequantize().isnan().all()


def test_infinity_gives_scale_1_and_the_largest_code():
    q = te.Float8CurrentScalingQuantizer(torch.float8_e5m2)(torch.tensor([float("inf"), float("-inf"), 1.0]))
    assert q._scale_inv.item() == 1.0
    assert q._data.tolist() == [0x7B, 0xFB, 0x3C]


def test_it_keeps_no_state():
    quantizer = te.Float8CurrentScalingQuantizer(E4M3)
    quantizer(torch.full((4,), 100.0))
    quantizer.calibrate(torch.full((4,), 1000.0))
    assert quantizer(torch.tensor([2.0]))._scale_inv.item() == np.float32(1) / np.float32(224)


def test_refilling_takes_the_new_tensors_scale():
    quantizer = te.Float8CurrentScalingQuantizer(E4M3)
    q = quantizer(torch.ones(4, 8))
    x = torch.randn(4, 8) * 50
    quantizer.update_quantized(x, q)
    fresh = quantizer(x)
    assert torch.equal(q._data, fresh._data)
    assert torch.equal(q._transpose, fresh._transpose)
    assert torch.equal(q._scale_inv, fresh._scale_inv)


def test_the_gradient_passes_straight_through():
    x = torch.randn(8, requires_grad=True)
    te.Float8CurrentScalingQuantizer(E4M3)(x).dequantize().pow(2).sum().backward()
    assert torch.equal(x.grad, 2 * te.Float8CurrentScalingQuantizer(E4M3)(x.detach()).dequantize())


def test_a_tensor_from_another_device_is_refused_with_both_named():
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, "meta")
    with pytest.raises(ArgumentError, match="a tensor on cpu; accepted: tensors on meta"):
        quantizer(torch.ones(4))
    for device in ("cpu", torch.device("cpu"), None):
        te.Float8CurrentScalingQuantizer(E4M3, device)(torch.ones(4))


BAD = {
    "negative epsilon": {"amax_epsilon": -1e-3},
    "epsilon is NaN": {"amax_epsilon": float("nan")},
    "epsilon is text": {"amax_epsilon": "0"},
    "epsilon is a bool": {"amax_epsilon": True},
    "pow_2 is a number": {"force_pow_2_scales": 1},
    "pow_2 is None": {"force_pow_2_scales": None},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_is_refused_by_name(case):
    (name,) = BAD[case]
    with pytest.raises(ArgumentError, match=f"Float8CurrentScalingQuantizer: {name}"):
        te.Float8CurrentScalingQuantizer(E4M3, **BAD[case])


def test_a_source_of_another_dtype_is_refused_with_four_facts():
    with pytest.raises(ArgumentError, match=r"torch\.int64") as raised:
        te.Float8CurrentScalingQuantizer(E4M3)(torch.ones(8, dtype=torch.int64))
    assert "torch.bfloat16" in raised.value.accepted
    with pytest.raises(ArgumentTypeError, match=r"a plain torch\.Tensor"):
        te.Float8CurrentScalingQuantizer(E4M3)([1.0])


def test_reduction_over_one_process_is_nothing_to_do():
    made = te.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    assert made(torch.ones(2))._data.tolist() == [0x7E, 0x7E]
    with pytest.raises(ArgumentTypeError, match="amax_reduction_group: got a str"):
        te.Float8CurrentScalingQuantizer(E4M3, amax_reduction_group="dp")


@pytest.mark.parametrize("epsilon", [-1.0, float("inf"), float("nan"), 1e39, True, "a"], ids=repr)
@pytest.mark.parametrize("make", [te.Float8CurrentScalingQuantizer, te.Float8BlockQuantizer], ids=["current", "block"])
def test_a_floor_of_amax_that_no_op_takes_is_refused_when_it_is_given(make, epsilon):
    with pytest.raises(ArgumentError, match=r"amax_epsilon: got .*from 0 to fp32's largest"):
        make(torch.float8_e4m3fn, amax_epsilon=epsilon)


@pytest.mark.parametrize("epsilon", [float("inf"), 1e39, -1.0])
def test_so_is_one_in_a_recipe(epsilon):
    with pytest.raises(ArgumentError, match="amax_epsilon"):
        recipe.Float8CurrentScaling().fp8_quant_fwd_inp = recipe.QParams(amax_epsilon=epsilon)
