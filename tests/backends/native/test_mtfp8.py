"""Moore Threads' blocks: casts give the bytes of cpu_reference and of loops, products stay within their bound."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import mtfp8_by_hand
import numpy as np
import pytest
import torch
from closeness import relative_error
from hard_values import draw
from native_backends import assert_same_storage, same

import te_hal
from te_hal import ops
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ElementFormat, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS

if TYPE_CHECKING:
    from native_backends import NativeBackend

REFERENCE = "cpu_reference"
ROW, SQUARE = ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128
EVERY_MODE = pytest.mark.parametrize("mode", [ROW, SQUARE], ids=lambda mode: mode.value)
SHAPES = [(1, 1), (1, 128), (8, 8), (13, 37), (3, 5, 7), (129,), (), (136, 264), (0, 16), (16, 0)]
COPIES = [(True, False), (False, True), (True, True)]
BOUND = GEMM.contract.bound


def assert_same_cast(native: NativeBackend, x: torch.Tensor, mode: ScalingMode, format: ElementFormat, **flags) -> None:
    settings = {"columnwise": True, "columnwise_order": "same", "dtype": format.dtype, "mode": mode, **flags}
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(x, **settings)
        decoded = ops.dequantize(expected)
    with native.use():
        found = ops.quantize(native.put(x), **settings)
        back = ops.dequantize(found)
    assert_same_storage(found, expected)
    assert same(back.reshape(-1), decoded.reshape(-1))


@EVERY_MODE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_dequantize_in_every_order_of_threads(shape, mode, ordered: NativeBackend) -> None:
    for target, (rowwise, columnwise) in itertools.product((E4M3, E5M2), COPIES):
        x = draw(shape, torch.bfloat16, "any bits")
        assert_same_cast(ordered, x, mode, target, rowwise=rowwise, columnwise=columnwise)


@EVERY_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantize_and_dequantize_of_every_dtype(dtype, mode, native: NativeBackend) -> None:
    for shape in SHAPES:
        assert_same_cast(native, draw(shape, dtype, "any bits"), mode, E4M3)


@EVERY_MODE
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-20, 1e-15, 3e38, float("inf"), float("-inf"), float("nan"), -0.0])
def test_blocks_of_one_value_alone_and_beside_another(value, mode, native: NativeBackend) -> None:
    x = torch.full((136, 264), value)
    assert_same_cast(native, x, mode, E5M2)
    x[3, 5] = 2.0
    assert_same_cast(native, x, mode, E4M3)


@EVERY_MODE
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_views_that_start_anywhere(offset, mode, native: NativeBackend) -> None:
    buffer = draw((offset + 40 * 136,), torch.bfloat16, "any bits")
    assert_same_cast(native, buffer[offset:].view(40, 136), mode, E4M3)


@EVERY_MODE
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_both_copies_are_those_of_loops_over_blocks(format, mode, ordered: NativeBackend) -> None:
    x = draw((130, 300), torch.float32, "any bits")
    with ordered.use():
        made = ops.quantize(
            ordered.put(x), dtype=format.dtype, mode=mode, columnwise=True, columnwise_order="same"
        ).tensors()
    for rowwise, (codes, scale_inv) in zip((True, False), (made[:2], made[2:]), strict=True):
        expected, scales = mtfp8_by_hand.cast(x, mode, format, rowwise=rowwise)
        assert np.array_equal(codes.cpu().numpy(), expected)
        assert scale_inv.cpu().numpy().tobytes() == scales.tobytes()


@pytest.mark.parametrize("pair", [p for p in itertools.product((ROW, SQUARE, None), repeat=2) if any(p)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", COPIES, ids=["rowwise", "columnwise", "both"])
def test_a_product_reads_the_blocks_along_the_sum(copies, layout, pair, native: NativeBackend) -> None:
    m, n, k = 136, 72, 264
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[layout]
    drawn = [torch.randn(s, generator=torch.Generator().manual_seed(i)).bfloat16() for i, s in enumerate(shapes)]
    flags = {"dtype": E4M3.dtype, "rowwise": copies[0], "columnwise": copies[1], "columnwise_order": "same"}
    with te_hal.use_backend(REFERENCE):
        given = [
            x if mode is None else ops.quantize(x, mode=mode, **flags) for x, mode in zip(drawn, pair, strict=True)
        ]
        exact = ops.gemm(*given, layout=layout, out_dtype=torch.float32)
    with native.use():
        for out_dtype in FLOATS:
            result = ops.gemm(*(native.put(x) for x in given), layout=layout, out_dtype=out_dtype).cpu()
            assert relative_error(result, exact.double()) <= 2 * BOUND[out_dtype]
