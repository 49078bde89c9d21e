"""MXFP8 against ml_dtypes' E8M0 and the reports that stand behind its rounding.

Cases B10 (pytorch/ao#2035, jax-ml/ml_dtypes#298, ml-explore/mlx#4353, ROCm/aiter#3212), B11 (microsoft/microxcaling#4)
and B13 (NVIDIA/TransformerEngine#3070). Whole tensors against brute force are in test_block_cast.py.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from block_oracle import MX, e8m0_values, spoil_padding

from te_hal import ops
from te_hal.backends.cpu_reference.block_scale import e8m0_scales, factors
from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E4M3, E5M2, ElementFormat
from te_hal.schema.gemm import LAYOUTS

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def test_every_code_stands_for_what_ml_dtypes_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found, expected = factors(codes).double().numpy(), e8m0_values(codes.numpy())
    assert np.array_equal(found, expected, equal_nan=True)
    assert found[0] == 2.0**-127
    assert np.isnan(found[255])


@pytest.mark.parametrize(
    ("amax", "code"),
    [(448.0, 127), (449.0, 128), (150.0, 126), (960.0, 129), (0.0, 0), (957.0, 129), (math.inf, 254)],
)
def test_a_scale_is_rounded_up_so_that_nothing_saturates(amax: float, code: int) -> None:
    """Case B10, and the table in docs/numerics.md."""
    x = torch.zeros(2, 64)
    x[1, 40] = -amax
    storage = quantize(x, dtype=E4M3.dtype, mode=MX, columnwise=True)
    assert storage.rowwise_scale_inv[1, 1] == code
    assert storage.columnwise_scale_inv[0, 40] == code
    if math.isfinite(amax):
        assert dequantize(storage)[1, 40].item() == pytest.approx(-amax, rel=2.0**-4)


def test_957_beside_960_becomes_960() -> None:
    """Case B11: OCP's rule rounds the exponent down, and 957 would saturate at 896."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 960.0, 957.0
    storage = quantize(x, dtype=E4M3.dtype, mode=MX)
    assert dequantize(storage)[0, :2].tolist() == [960.0, 960.0]
    assert storage.rowwise_scale_inv[0, 0] == 129  # a factor of 4: 957 / 4 = 239.25 becomes 240


@FORMATS
def test_the_code_is_the_least_power_of_two_not_below_the_product(format: ElementFormat) -> None:
    """Exact arithmetic, over every exponent of fp32 and the neighbours of every power of two."""
    powers = np.ldexp(np.float32(format.max), np.arange(-149, 128).clip(-149, 126 - int(math.log2(format.max))))
    edges = np.concatenate([powers, np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))])
    random = np.random.default_rng(0).integers(0, 0x7F800000, 4000, dtype=np.uint32).view(np.float32)
    amax = np.concatenate([edges.astype(np.float32), random, np.float32([0.0, 1e-45, 3.4028235e38])])
    scales = e8m0_scales(torch.from_numpy(amax), format)
    products = amax * np.float32(1.0 / format.max)
    for product, code, scale in zip(products, scales.scale_inv.tolist(), scales.scale.tolist(), strict=True):
        factor = Fraction(2) ** (code - 127)
        assert Fraction(float(product)) <= factor
        assert code == 0 or factor / 2 < Fraction(float(product))
        assert Fraction(scale) == 1 / factor


@FORMATS
def test_no_element_of_a_finite_block_saturates(format: ElementFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    amax = torch.empty(2000, 1).uniform_(-100, 100, generator=generator).exp2()
    x = amax * torch.rand(2000, 32, generator=generator)
    storage = quantize(x, dtype=format.dtype, mode=MX)
    scale = e8m0_scales(x.amax(1), format).scale
    assert (x * scale[:, None]).amax() <= format.max
    assert (dequantize(storage) - x).abs().max(1).values.lt(2.0**-2 * amax[:, 0]).all()


def test_codes_are_those_of_ml_dtypes_at_an_exact_power_of_two() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    storage = quantize(x, dtype=E4M3.dtype, mode=MX)
    factor = e8m0_values(storage.rowwise_scale_inv[:64, :3].contiguous().numpy()).repeat(32, 1)
    expected = (x.double().numpy() / factor).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(storage.rowwise_data.numpy(), expected)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_of_scales_reaches_no_product(layout: str, byte: int) -> None:
    """Case B13: (96, 96), whose scales are padded to 128."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        quantize(torch.randn(96, 96, generator=generator).bfloat16(), dtype=E4M3.dtype, mode=MX, columnwise=True)
        for _ in range(2)
    )
    expected = ops.gemm(a, b, layout=layout)
    spoilt = [spoil_padding(storage, byte) for storage in (a, b)]
    assert torch.equal(ops.gemm(*spoilt, layout=layout), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("flags", [{"amax_epsilon": 1e-9}, {"power_of_2": True}], ids=str)
def test_it_takes_no_floor_and_no_choice_of_rounding(flags: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="MXFP8's scales are powers of two without a floor"):
        ops.quantize(torch.ones(32, 32), dtype=E4M3.dtype, mode=MX, **flags)  # type: ignore[arg-type]
