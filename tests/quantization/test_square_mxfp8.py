"""MXFP8 with a scale per 32x32 elements (docs/numerics.md, M4), against loops over squares."""

from __future__ import annotations

import itertools

import block_oracle
import numpy as np
import pytest
import torch
from fp8_codes import codes_of

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, ElementFormat

FORMATS = {"E4M3": E4M3, "E5M2": E5M2}


def quantizer(format: ElementFormat = E4M3, **usages: bool) -> te.MXFP8Quantizer:
    return te.MXFP8Quantizer(format.dtype, with_2d_quantization=True, **usages)


def by_hand(x: torch.Tensor, format: ElementFormat) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[M, K]`` and E8M0 codes of the squares."""
    given = x.float().numpy()
    counts = tuple(-(-size // 32) for size in given.shape)
    codes, scales = np.zeros(given.shape, np.uint8), np.zeros(counts, np.uint8)
    for i, j in itertools.product(*map(range, counts)):
        part = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
        scales[i, j] = block_oracle.e8m0_code(block_oracle.block_amax(given[part]), format)
        codes[part] = codes_of(given[part], format, np.float32(2.0 ** (127.0 - scales[i, j])))
    return codes, scales


def hard(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Squares of very different size, one of zeros, one with a NaN, one with an infinity."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    x[:32, :32] = 0
    x[0, -1], x[-1, 0] = float("nan"), float("-inf")
    return x.to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(96, 128), (70, 100), (5, 7), (32, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_copies_hold_the_codes_and_scales_of_loops_over_squares(dtype, shape, format):
    x = hard(*shape, dtype)
    q = quantizer(FORMATS[format])(x)
    codes, scales = by_hand(x, FORMATS[format])
    rows, cols = shape
    assert q.dtype is dtype
    assert np.array_equal(q._rowwise_data.numpy(), codes)
    assert np.array_equal(q._columnwise_data.numpy(), codes)
    repeated = scales.repeat(32, 0)[:rows]
    assert np.array_equal(q._rowwise_scale_inv[:rows, : scales.shape[1]].numpy(), repeated)
    repeated = scales.repeat(32, 1)[:, :cols]
    assert np.array_equal(q._columnwise_scale_inv[: scales.shape[0], :cols].numpy(), repeated)


@pytest.mark.parametrize("usages", [{"columnwise": False}, {"rowwise": False}], ids=str)
def test_a_single_copy_is_that_of_both(usages):
    x = torch.randn(70, 100)
    one, both = quantizer(**usages)(x), quantizer()(x)
    assert torch.equal(one.dequantize(), both.dequantize())
    for name in ("rowwise", "columnwise"):
        assert (getattr(one, f"_{name}_data") is None) == (usages.get(name) is False)


def test_a_tensor_is_refilled_in_place():
    made, x = quantizer(), torch.randn(64, 96)
    out = made.make_empty((64, 96))
    address = out._rowwise_data.data_ptr()
    assert made.quantize(x, out=out) is out
    assert out._rowwise_data.data_ptr() == address
    assert torch.equal(out.dequantize(), made(x).dequantize())


@pytest.mark.parametrize("backend", ["cpu_reference", "musa_emulator"])
def test_linear_quantizes_its_weight_alone_by_squares(backend):
    if backend not in [info.name for info in te_hal.list_backends() if info.usable]:
        pytest.skip(f"{backend} is not usable here")
    module = te.Linear(96, 64, params_dtype=torch.bfloat16, bias=False)
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    gy = torch.randn(64, 64, dtype=torch.bfloat16)
    with te_hal.use_backend(backend), te.autocast(recipe=recipe.MXFP8BlockScaling(enable_2d_quantization=True)):
        y = module(x)
        y.backward(gy)
    weight = quantizer()(module.weight.detach()).dequantize(dtype=torch.float32).double()
    cast = {
        name: torch.from_numpy(block_oracle.cast(t.detach(), block_oracle.MX, E4M3, rowwise=True).values)
        for name, t in (("x", x), ("gy", gy))
    }
    for found, exact in ((y, cast["x"] @ weight.T), (x.grad, cast["gy"] @ weight)):
        # One rounding to bf16, 2e-3 at most.
        assert (found.double() - exact).norm() <= 3e-3 * exact.norm()
    assert [q.with_2d_quantization for q in module.quantizers["scaling_fwd"]] == [False, True, False]


def test_a_result_that_is_cast_where_it_is_computed_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="with_2d_quantization"):
        quantizer().fused_arguments(rowwise=True, columnwise=False)
