"""Casts by Moore Threads' rule (docs/numerics.md, T1 to T3), against loops over blocks with numpy and ml_dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import mtfp8_by_hand
import numpy as np
import pytest
import torch

from te_hal import ops
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, ElementFormat, ScalingMode

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

ROW, SQUARE = ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128
CODES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
SETTINGS = {"rowwise": True, "columnwise": True, "columnwise_order": "same"}


def cast(x: torch.Tensor, mode: ScalingMode, format: ElementFormat = E4M3) -> QuantizedStorage:
    return ops.quantize(x, dtype=format.dtype, mode=mode, **SETTINGS)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("mode", [ROW, SQUARE])
@pytest.mark.parametrize("shape", [(256, 384), (130, 300), (3, 5), (1, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_both_copies_are_those_of_loops_over_blocks(dtype, shape, mode, format):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-20, 12, (1, shape[1])).float())).to(dtype)
    x[0, 0] = 0
    storage = cast(x, mode, format)
    for rowwise, codes, scale_inv in (
        (True, storage.rowwise_data, storage.rowwise_scale_inv),
        (False, storage.columnwise_data, storage.columnwise_scale_inv),
    ):
        expected, scales = mtfp8_by_hand.cast(x, mode, format, rowwise=rowwise)
        assert scale_inv.numpy().tobytes() == scales.tobytes()
        assert np.array_equal(codes.numpy(), expected)


#: docs/numerics.md, the table below T3.
TABLE = {
    "zeros": ([0.0], 2.2321429e-18, [0x00]),
    "values": ([3.0, -1.5], 0.006696429, [0x7E, 0xF6]),
    "below the floor": ([1e-20], 2.2321429e-18, [0x02]),
    "infinity": ([float("inf"), 2.0], float("inf"), [0x7F, 0x00]),
    "nan": ([float("nan"), 2.0], 0.004464286, [0x7F, 0x7E]),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table_of_the_rule(case):
    values, scale_inv, codes = TABLE[case]
    storage = cast(torch.tensor([values], dtype=torch.bfloat16), ROW)
    assert storage.rowwise_scale_inv.item() == pytest.approx(scale_inv, rel=1e-6)
    assert storage.rowwise_data.flatten().tolist() == codes


def test_a_block_of_zeros_in_fp16_is_zero_and_not_nan():
    x = torch.zeros(256, 256, dtype=torch.float16)
    x[:, 0] = 1
    for rowwise in (True, False):
        storage = cast(x, ROW).keep(rowwise=rowwise, columnwise=not rowwise)
        assert torch.equal(ops.dequantize(storage), x)


@pytest.mark.parametrize("mode", [ROW, SQUARE])
def test_dequantizing_is_the_code_times_its_factor(mode):
    x = torch.randn(130, 260)
    codes, scales = mtfp8_by_hand.cast(x, mode, E4M3, rowwise=True)
    down = 128 if mode is SQUARE else 1
    factors = scales.repeat(down, 0)[:130].repeat(128, 1)[:, :260]
    values = codes.view(CODES["E4M3"]).astype(np.float32) * factors
    assert np.array_equal(ops.dequantize(cast(x, mode)).numpy(), values)


@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_a_product_is_that_of_the_dequantized_blocks(layout):
    a, b = {"fprop": ((64, 160), (96, 160)), "dgrad": ((64, 96), (96, 160)), "wgrad": ((64, 96), (64, 160))}[layout]
    a, b = torch.randn(a), torch.randn(b)
    left, right = cast(a, ROW), cast(b, SQUARE)
    x, y = (torch.from_numpy(_decoded(storage, layout == "wgrad" and storage is left)) for storage in (left, right))
    exact = {"fprop": lambda: x @ y.T, "dgrad": lambda: x @ y, "wgrad": lambda: x.T @ y}[layout]()
    found = ops.gemm(left, right, layout=layout, out_dtype=torch.float32)
    # Both sum up to 160 products in fp32, whose rounding is 6e-8.
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()


def _decoded(storage: QuantizedStorage, columnwise: bool) -> np.ndarray:
    """The copy whose blocks lie along the sum, in float64."""
    codes = storage.columnwise_data if columnwise else storage.rowwise_data
    scales = (storage.columnwise_scale_inv if columnwise else storage.rowwise_scale_inv).numpy().astype(np.float64)
    down, along = (128, 128) if storage.mode is SQUARE else (128, 1) if columnwise else (1, 128)
    rows, cols = storage.shape
    factors = scales.repeat(down, 0)[:rows].repeat(along, 1)[:, :cols]
    return codes.numpy().view(CODES["E4M3"]).astype(np.float64) * factors


def test_a_transposed_columnwise_copy_is_refused():
    with pytest.raises(ArgumentError, match="rowwise order"):
        ops.quantize(torch.ones(4, 4), dtype=E4M3.dtype, mode=ROW, rowwise=False, columnwise=True)


def test_a_product_with_transformer_engines_blocks_is_refused_by_name():
    other = ops.quantize(torch.ones(16, 16), dtype=E4M3.dtype, mode="block_1x128")
    with pytest.raises(UnsupportedError, match="'block_1x128' and 'mtfp8_1x128'"):
        ops.gemm(cast(torch.ones(16, 16), ROW), other)
