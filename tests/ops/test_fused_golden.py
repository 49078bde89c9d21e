"""What Transformer Engine's fused kernels wrote, reproduced byte for byte by composing ops.

What is rounded between the two halves of a fused op is part of its contract: with delayed scaling the fp32 result
goes into amax and cast; with current scaling the result rounded to bf16 does, except that after an activation the
amax is still taken from the fp32 result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import golden_values
import numpy as np
import pytest
import torch
from closeness import half_step

from te_hal import ops
from te_hal.schema.formats import E4M3, E5M2, ElementFormat

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

RECORDED = golden_values.load("fused")
DELAYED_SCALE = 0.7

#: The recorded reciprocal roots lie up to two units in the last place from the float64 values; ours within one.
RSTD_UNITS = 2

#: bf16 results that are one step off where nothing is quantized, of all results: the last bit of fp32 exponentials,
#: reciprocal roots and fused multiply-adds differs between a CPU and a GPU and sometimes decides a rounding. None of
#: these differences reaches an FP8 byte.
STEPS_OFF = {"geglu": 4, "layernorm": 1}
# For the same reason the largest magnitude of computed values, and the scale made from it, may be one unit off (the
# `units` below); that of a given tensor is exact.


def assert_written(storage: QuantizedStorage, recorded: dict[str, torch.Tensor], units: int) -> None:
    assert torch.equal(storage.rowwise_data, recorded["data"])
    assert torch.equal(storage.columnwise_data, recorded["transpose"])
    assert_units_off(storage.rowwise_scale_inv, recorded["scale_inv"], units)


def assert_units_off(result: torch.Tensor, recorded: torch.Tensor, at_most: int) -> None:
    np.testing.assert_array_max_ulp(result.numpy(), recorded.numpy(), maxulp=at_most)


def assert_delayed(
    fp32: torch.Tensor, format: ElementFormat, recorded: dict[str, torch.Tensor], units: int = 1
) -> None:
    amax = torch.zeros(1)
    scale = torch.tensor([DELAYED_SCALE])
    assert_written(ops.quantize(fp32, scale, amax=amax, dtype=format.dtype, columnwise=True), recorded, units)
    assert_units_off(amax, recorded["amax"], units)


def assert_current(
    values: torch.Tensor,
    amax_of: torch.Tensor,
    format: ElementFormat,
    recorded: dict[str, torch.Tensor],
    units: int = 1,
) -> None:
    scale = ops.compute_scale(ops.amax(amax_of), fp8_max=format.max)
    assert_written(ops.quantize(values, scale, dtype=format.dtype, columnwise=True), recorded, units)


def assert_steps_off(result: torch.Tensor, recorded: torch.Tensor, at_most: int) -> None:
    assert (result != recorded).sum() <= at_most
    distance = (result.double() - recorded.double()).abs()
    assert (distance <= 2 * half_step(recorded, torch.bfloat16)).all()


def normalised(
    norm: str, zero_centered: bool, recorded: dict[str, torch.Tensor], out_dtype: torch.dtype
) -> torch.Tensor:
    """The norm's result, after its statistics were compared."""
    flags = {"zero_centered_gamma": zero_centered, "out_dtype": out_dtype}
    if norm == "layernorm":
        output, mean, rstd = ops.layernorm_fwd(recorded["x"], recorded["weight"], recorded["bias"], **flags)
        assert torch.equal(mean, recorded["mu"])
    else:
        output, rstd = ops.rmsnorm_fwd(recorded["x"], recorded["weight"], **flags)
    np.testing.assert_array_max_ulp(rstd.numpy(), recorded["rsigma"].numpy(), maxulp=RSTD_UNITS)
    return output


@pytest.mark.parametrize("case", RECORDED.cases("norm/"))
def test_a_norm_and_a_cast_give_the_fused_bytes(case: str) -> None:
    _, norm, _, zero_centered, quantizer = case.split("/")
    recorded, centered = RECORDED.case(case), zero_centered == "zc=True"
    rounded = normalised(norm, centered, recorded, torch.bfloat16)
    assert_steps_off(rounded, recorded["plain"], STEPS_OFF.get(norm, 0))
    if quantizer == "delayed":
        assert_delayed(normalised(norm, centered, recorded, torch.float32), E4M3, recorded)
    else:
        assert_current(rounded, rounded, E4M3, recorded)


@pytest.mark.parametrize("case", RECORDED.cases("act/"))
def test_an_activation_and_a_cast_give_the_fused_bytes(case: str) -> None:
    _, activation, _, quantizer = case.split("/")
    recorded = RECORDED.case(case)
    fp32 = ops.activation_fwd(recorded["x"], activation=activation, out_dtype=torch.float32)
    assert_steps_off(fp32.bfloat16(), recorded["plain"], STEPS_OFF.get(activation, 0))
    if quantizer == "delayed":
        assert_delayed(fp32, E4M3, recorded)
    else:
        assert_current(fp32.bfloat16(), fp32, E4M3, recorded)


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_gelu_gradient_its_bias_gradient_and_a_cast_give_the_fused_bytes(quantizer: str) -> None:
    recorded = RECORDED.case(f"dbias_dgelu/bfloat16/{quantizer}")
    fp32 = ops.activation_bwd(recorded["g"], recorded["x"], activation="gelu", out_dtype=torch.float32)
    if quantizer == "delayed":
        assert_delayed(fp32, E5M2, recorded)
        grad_bias = ops.bias_grad(fp32, out_dtype=torch.bfloat16)
    else:
        assert_current(fp32.bfloat16(), fp32, E5M2, recorded)
        grad_bias = ops.bias_grad(fp32.bfloat16())
    assert torch.equal(grad_bias, recorded["dbias"])


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_bias_gradient_and_a_cast_give_the_fused_bytes(quantizer: str) -> None:
    recorded = RECORDED.case(f"bgrad_quantize/bfloat16/{quantizer}")
    grad = recorded["g"]
    if quantizer == "delayed":
        assert_delayed(grad, E5M2, recorded, units=0)
    else:
        assert_current(grad, grad, E5M2, recorded, units=0)
    assert torch.equal(ops.bias_grad(grad), recorded["dbias"])
