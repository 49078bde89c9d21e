"""Fused kernels beside what Transformer Engine's wrote, and beside the composition by cpu_reference.

The last bit of an exponential or a reciprocal root may decide a rounding: by one code, in one of a thousand bytes.
"""

import golden_values
import numpy as np
import pytest
import torch
from native_ops import Cast, activation_bwd_quantize, activation_quantize, bias_grad_quantize, is_gated, norm_quantize

from te_hal import ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECORDED = golden_values.load("fused")
UNITS, ONE_IN = 2, 1000


def ordered(codes):
    """Integers that neighbour where codes do."""
    codes = codes.to(torch.int16)
    return torch.where(codes >= 128, 128 - codes, codes)


def assert_nearly(quantized, recorded):
    for got, key in ((quantized.rowwise, "data"), (quantized.columnwise, "transpose")):
        assert (got != recorded[key]).sum() * ONE_IN <= got.numel()
        assert (ordered(got) - ordered(recorded[key])).abs().max() <= 1
    np.testing.assert_array_max_ulp(quantized.scale_inv.numpy(), recorded["scale_inv"].numpy(), maxulp=UNITS)
    if "amax" in recorded:
        np.testing.assert_array_max_ulp(quantized.amax.numpy(), recorded["amax"].numpy(), maxulp=UNITS)


def chosen_cast(case, dtype):
    return Cast(dtype, scale=0.7) if case.endswith("delayed") else Cast(dtype)


@pytest.mark.parametrize("case", RECORDED.cases("norm/"))
def test_a_norm_and_its_cast_are_nearly_the_recorded_bytes(host_library, case):
    _, norm, _, zero_centered, _ = case.split("/")
    recorded = RECORDED.case(case)

    quantized, _, mean, rstd = norm_quantize(
        *(host_library, norm, recorded["x"], recorded["weight"], recorded.get("bias"), chosen_cast(case, E4M3)),
        zero_centered=zero_centered == "zc=True",
    )

    assert_nearly(quantized, recorded)
    np.testing.assert_array_max_ulp(rstd.numpy(), recorded["rsigma"].numpy(), maxulp=2 * UNITS)
    assert mean is None or torch.allclose(mean, recorded["mu"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", RECORDED.cases("act/"))
def test_an_activation_and_its_cast_are_nearly_the_recorded_bytes(host_library, case):
    recorded = RECORDED.case(case)

    quantized = activation_quantize(host_library, case.split("/")[1], recorded["x"], chosen_cast(case, E4M3))

    assert_nearly(quantized, recorded)


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_the_recorded_gradients_are_nearly_made(host_library, quantizer):
    of_gelu = RECORDED.case(f"dbias_dgelu/bfloat16/{quantizer}")
    alone = RECORDED.case(f"bgrad_quantize/bfloat16/{quantizer}")
    cast = chosen_cast(quantizer, E5M2)

    quantized, sums = activation_bwd_quantize(
        host_library, "gelu", of_gelu["g"], of_gelu["x"], cast, bias_dtype=torch.bfloat16
    )
    assert_nearly(quantized, of_gelu)
    assert torch.allclose(sums.float(), of_gelu["dbias"].float(), rtol=2**-7)

    quantized, sums = bias_grad_quantize(host_library, alone["g"], cast)
    assert torch.equal(quantized.rowwise, alone["data"])
    assert torch.equal(quantized.columnwise, alone["transpose"])
    assert torch.equal(sums, alone["dbias"])


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "qgeglu"])
def test_an_activation_is_nearly_what_the_reference_composes(host_library, quantizer, dtype, activation):
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(136, 264 * (2 if is_gated(activation) else 1), generator=generator).bfloat16()
    fp32 = ops.activation_fwd(x, activation=activation, out_dtype=torch.float32)
    amax = ops.amax(fp32)
    delayed = quantizer == "delayed"
    scale = torch.tensor([0.7]) if delayed else ops.compute_scale(amax, fp8_max=torch.finfo(dtype).max)
    expected = ops.quantize(fp32 if delayed else fp32.bfloat16(), scale, dtype=dtype, columnwise=True)

    quantized = activation_quantize(host_library, activation, x, chosen_cast(quantizer, dtype))

    recorded = {"data": expected.rowwise_data, "transpose": expected.columnwise_data, "amax": amax}
    assert_nearly(quantized, recorded | {"scale_inv": expected.rowwise_scale_inv})
