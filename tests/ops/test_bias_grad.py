"""The bias gradient as a composition, against float64."""

from __future__ import annotations

import pytest
import torch
from closeness import FP32_ROUNDING, relative_error, roundings

from te_hal import ops
from te_hal.schema.formats import FLOATS
from te_hal.schema.gemm import BIAS_GRAD


@pytest.mark.parametrize("rows", [1, 300, 8192])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_in_fp32_and_rounds_once(dtype: torch.dtype, rows: int) -> None:
    grad = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, fp32_error = grad.double().sum(0), grad.double().abs().sum(0) * rows * FP32_ROUNDING
    for out_dtype in (None, torch.float32):
        result = ops.bias_grad(grad, out_dtype=out_dtype)
        assert result.dtype == (out_dtype or dtype)
        assert roundings(result, exact, fp32_error) <= 1.0
        assert relative_error(result, exact) <= BIAS_GRAD.contract.bound[result.dtype]


def test_a_bf16_sum_does_not_stall() -> None:
    """Summed in bf16, ones stop counting at 256."""
    assert torch.equal(ops.bias_grad(torch.ones(4096, 2).bfloat16()), torch.full((2,), 4096.0).bfloat16())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_no_rows_give_zeros(shape: tuple[int, int]) -> None:
    assert torch.equal(ops.bias_grad(torch.empty(shape).bfloat16()), torch.zeros(shape[1]).bfloat16())


def test_memory_order_does_not_matter() -> None:
    grad = torch.arange(12.0).view(3, 4)
    assert torch.equal(ops.bias_grad(grad.t()), torch.tensor([6.0, 22.0, 38.0]))
