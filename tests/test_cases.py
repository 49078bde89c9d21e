"""Known traps: small inputs on which systems of this kind failed, each with the test that holds the right value.

Numbers are those of the project's list of public reports. The literal input of a report stands here where no other
test uses it.
"""

from __future__ import annotations

import known_cases_backends
import known_cases_numbers
import known_cases_training
import pytest
import torch
from named_tests import missing

import te_hal.modules as te
import te_hal.ops
from te_hal import recipe

CASES = known_cases_numbers.CASES | known_cases_training.CASES | known_cases_backends.CASES


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_tests_that_exist(name):
    assert CASES[name].tests
    assert missing(CASES[name].tests) == []


def test_overflow_saturates_and_nan_stays_nan():
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), torch.float8_e4m3fn)
    codes = quantizer(torch.tensor([[1000.0, 448.0, 464.0, 465.0, -1000.0, float("nan")]]))._data
    assert bytes(codes.flatten().tolist()).hex() == "7e7e7e7efe7f"


CHOSEN = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("what", ["input", "row", "weight"])
def test_zero_inputs_rows_and_weights_stay_zero_and_finite(what, name):
    module, x = te.Linear(64, 64, bias=False), torch.randn(16, 64)
    with torch.no_grad():
        {"input": x, "row": x[3], "weight": module.weight}[what].zero_()
    x.requires_grad_()
    for _ in range(2):
        with te.autocast(recipe=CHOSEN[name]()):
            y = module(x)
        y.sum().backward()
    assert not (y[3] if what == "row" else y).any()
    assert all(value.isfinite().all() for value in (y, x.grad, module.weight.grad))
    if name == "delayed" and what != "row":
        assert module.fp8_meta["scaling_fwd"].scale[0 if what == "input" else 1] == 1.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 3.4028234663852886e38, 149.3333282470703]),
        ({"power_of_2": True}, [1, 1, 1, 2.0**127, 128]),
        ({"epsilon": 4.0}, [112, 1, 1, 112, 112]),
    ],
    ids=["plain", "power_of_2", "epsilon"],
)
def test_scales_at_the_edges(settings, expected):
    amax = torch.tensor([0.0, float("nan"), float("inf"), 1e-37, 3.0])
    assert torch.equal(te_hal.ops.compute_scale(amax, fp8_max=448.0, **settings), torch.tensor(expected))


def test_a_bf16_bias_is_added_to_an_fp32_result_exactly():
    ones, bias = torch.ones(16, 16, dtype=torch.bfloat16), torch.arange(16, dtype=torch.bfloat16)
    result = te_hal.ops.gemm(ones, ones, bias=bias, out_dtype=torch.float32)
    assert torch.equal(result, (16 + torch.arange(16.0)).expand(16, 16))


def test_a_columnwise_only_tensor_of_one_scale_has_its_shape_and_no_rowwise_buffer():
    source = torch.randn(128, 256)
    q = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=False)(source)
    assert (q.shape, q.size(0), q._data) == ((128, 256), 128, None)
    assert (q.dequantize() - source).norm() < 0.05 * source.norm()


def test_calibration_records_the_largest_magnitude_of_negative_inputs():
    module, x = te.Linear(32, 16), torch.full((8, 32), -5.0)
    x[3, 4] = 0.1
    with te.autocast(enabled=False, calibrating=True):
        y = module(x)
    assert module.fp8_meta["scaling_fwd"].amax_history[0, 0] == 5.0
    assert torch.equal(y, module(x))


def test_eight_rows_in_two_leading_dimensions_pass():
    with te.autocast():
        assert te.Linear(256, 256)(torch.randn(2, 4, 256)).shape == (2, 4, 256)
