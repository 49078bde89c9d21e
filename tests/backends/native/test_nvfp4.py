"""NVFP4: casts give the bytes of cpu_reference and of loops, products stay within their bound."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import golden_values
import nvfp4_by_hand
import pytest
import torch
from closeness import relative_error
from hard_values import draw
from native_backends import same

import te_hal
from te_hal import ops
from te_hal.schema.block_scales import block_copy
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E2M1, E4M3, FLOATS, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS
from te_hal.schema.nvfp4_layout import tensor_amax

if TYPE_CHECKING:
    from native_backends import NativeBackend

    from te_hal.schema.storage import QuantizedStorage

REFERENCE = "cpu_reference"
RECORDED = golden_values.load("quantizers")
PLAIN, SQUARE, HADAMARD = ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD
SEED = (7 << 40) + 12345
#: Mode and seed of the casts that there are.
CASTS = [(PLAIN, None), (PLAIN, SEED), (SQUARE, None), (HADAMARD, None), (HADAMARD, SEED)]
EVERY_CAST = pytest.mark.parametrize(("mode", "seed"), CASTS, ids=lambda v: getattr(v, "value", v and "by chance"))
SHAPES = [(16, 16), (16, 1024), (272, 16), (2, 8, 48), (144, 272)]
#: With an infinity in it a tensor has no scale to speak of; so both.
PATTERNS = ("wide", "any bits")
COPIES = [(True, False), (False, True), (True, True)]
BOUND = GEMM.contract.bound


def quantize(x: torch.Tensor, mode: ScalingMode, seed: int | None = None, **flags: object) -> QuantizedStorage:
    settings = {"rowwise": True, "columnwise": True, **flags}
    return ops.quantize(x, dtype=E2M1.dtype, mode=mode, rounding_seed=seed, **settings)  # type: ignore[arg-type]


def parts(storage: QuantizedStorage) -> list[torch.Tensor]:
    """Codes, scales without their padding, and amax of every copy."""
    found = []
    for rowwise, held in ((True, storage.kind.rowwise), (False, storage.kind.columnwise)):
        if held:
            copy, scale_inv = block_copy(storage, rowwise=rowwise), storage.tensors()[1 if rowwise else 3]
            found += [copy.codes, copy.grid.reshape(-1).clone(), tensor_amax(scale_inv)]  # type: ignore[arg-type]
    return found


def assert_same(found: QuantizedStorage, expected: QuantizedStorage) -> None:
    assert found.kind is expected.kind
    assert [same(a, b) for a, b in zip(parts(found), parts(expected), strict=True)].count(False) == 0


def assert_same_cast(native: NativeBackend, x: torch.Tensor, mode: ScalingMode, seed: int | None, **flags) -> None:
    with te_hal.use_backend(REFERENCE):
        expected = quantize(x, mode, seed, **flags)
        decoded = ops.dequantize(expected)
    with native.use():
        found = quantize(native.put(x), mode, seed, **flags)
        back = ops.dequantize(found)
    assert_same(found, expected)
    assert back.shape == decoded.shape
    assert same(back.reshape(-1), decoded.reshape(-1))


@EVERY_CAST
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_dequantize_in_every_order_of_threads(shape, mode, seed, ordered: NativeBackend) -> None:
    for rowwise, columnwise in COPIES:
        for pattern in PATTERNS:
            x = draw(shape, torch.bfloat16, pattern)
            assert_same_cast(ordered, x, mode, seed, rowwise=rowwise, columnwise=columnwise)


@EVERY_CAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quantize_and_dequantize_of_every_dtype(dtype, mode, seed, native: NativeBackend) -> None:
    columnwise = mode is not HADAMARD  # whose transform takes bf16 alone
    for shape, pattern in itertools.product(SHAPES, PATTERNS):
        assert_same_cast(native, draw(shape, dtype, pattern), mode, seed, columnwise=columnwise)


@pytest.mark.parametrize("mode", [PLAIN, SQUARE, HADAMARD])
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_a_tensor_without_elements_has_an_amax_of_zero(shape, mode, native: NativeBackend) -> None:
    for rowwise, columnwise in COPIES:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        assert_same_cast(native, x, mode, None, rowwise=rowwise, columnwise=columnwise)


@EVERY_CAST
@pytest.mark.parametrize("value", [1e-40, 2.0**-126, 3e38, float("inf"), float("-inf"), float("nan"), -0.0])
def test_blocks_of_one_value_alone_and_beside_another(value, mode, seed, native: NativeBackend) -> None:
    x = torch.full((32, 48), value).bfloat16()
    assert_same_cast(native, x, mode, seed)
    x[3, 5] = 2.0
    assert_same_cast(native, x, mode, seed)


@EVERY_CAST
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_views_that_start_anywhere(offset, mode, seed, native: NativeBackend) -> None:
    buffer = draw((offset + 32 * 144,), torch.bfloat16, "wide")
    with te_hal.use_backend(REFERENCE):
        expected = quantize(buffer[offset:].view(32, 144), mode, seed)
    with native.use():
        found = quantize(native.put(buffer)[offset:].view(32, 144), mode, seed)
    assert_same(found, expected)


@EVERY_CAST
def test_a_storage_is_refilled_wherever_its_buffers_lie_and_padding_stays(mode, seed, native: NativeBackend) -> None:
    x, padding = draw((48, 144), torch.bfloat16, "wide"), 0x5A
    with te_hal.use_backend(REFERENCE):
        expected = quantize(x, mode, seed)
    buffers = []
    for tensor in expected.tensors():
        assert tensor is not None
        room = torch.full((2 * tensor.numel() + 1,), padding, dtype=torch.uint8, device=native.device)
        gaps = tensor.dim() == 2  # codes with gaps, scales one byte off
        buffers.append(room[: 2 * tensor.numel() : 2].view(tensor.shape) if gaps else room[1 : 1 + tensor.numel()])
    with native.use():
        out = expected.with_tensors(tuple(buffers))
        assert quantize(native.put(x), mode, seed, out=out) is out
        assert same(ops.dequantize(out), ops.dequantize(native.put(expected)))
    assert_same(out, expected)
    untouched = out.with_tensors(tuple(buffer.cpu() for buffer in buffers))
    for rowwise, scale_inv in ((True, untouched.rowwise_scale_inv), (False, untouched.columnwise_scale_inv)):
        block_copy(untouched, rowwise=rowwise).grid.fill_(padding)
        assert set(scale_inv[:-4].unique().tolist()) == {padding}  # type: ignore[index]


@pytest.mark.parametrize("mode", [PLAIN, SQUARE, HADAMARD])
def test_both_copies_are_what_loops_give(mode, ordered: NativeBackend) -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    with ordered.use():
        storage = quantize(ordered.put(x), mode)
    lines = nvfp4_by_hand.hadamard(x.t()) if mode is HADAMARD else x.t()
    copies = [nvfp4_by_hand.cast(values, square=mode is SQUARE) for values in (x, lines)]
    found = parts(storage)
    for copy, (codes, scales, amax) in zip(copies, (found[:3], found[3:]), strict=True):
        grid = torch.from_numpy(copy.scales)
        expected = (copy.packed(), grid if copy is copies[0] else grid.t(), torch.tensor([copy.amax]))
        assert same(codes, expected[0])
        assert same(scales, expected[1].reshape(-1))
        assert same(amax, expected[2])


def test_the_recorded_bytes(ordered: NativeBackend) -> None:
    (case,) = RECORDED.cases("nvfp4ref/")
    recorded = RECORDED.case(case)
    with ordered.use():
        row, _, row_amax, column, _, column_amax = parts(quantize(ordered.put(recorded["x"]), PLAIN))
    assert same(row, recorded["data"])
    assert same(column, recorded["data_t"])
    assert same(row_amax, recorded["global_amax_row"])
    assert same(column_amax, recorded["global_amax_col"])


PAIRS = [(a, b) for a, b in itertools.product((PLAIN, SQUARE, HADAMARD, None), repeat=2) if a or b]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(m.value if m else "bf16" for m in pair))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", COPIES, ids=["rowwise", "columnwise", "both"])
def test_a_product_is_that_of_the_reference_or_refused_like_it(copies, layout, pair, native: NativeBackend) -> None:
    m, n, k = 144, 80, 272
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[layout]
    drawn = [torch.randn(s, generator=torch.Generator().manual_seed(i)).bfloat16() for i, s in enumerate(shapes)]
    flags = dict(zip(("rowwise", "columnwise"), copies, strict=True))
    with te_hal.use_backend(REFERENCE):
        given = [x if mode is None else quantize(x, mode, **flags) for x, mode in zip(drawn, pair, strict=True)]
        try:
            exact = ops.gemm(*given, layout=layout, out_dtype=torch.float32)
        except UnsupportedError:
            exact = None
    with native.use():
        put = [native.put(x) for x in given]
        if exact is None:
            with pytest.raises(UnsupportedError, match="with the transform, or neither"):
                ops.gemm(*put, layout=layout)
            return
        for out_dtype in FLOATS:
            result = ops.gemm(*put, layout=layout, out_dtype=out_dtype).cpu()
            assert relative_error(result, exact.double()) <= 2 * BOUND[out_dtype]


def test_bias_and_accumulation(native: NativeBackend) -> None:
    x, w, bias, out = (torch.randn(shape) for shape in [(48, 160), (32, 160), (32,), (48, 32)])
    with te_hal.use_backend(REFERENCE):
        a, b = quantize(x.bfloat16(), PLAIN), quantize(w.bfloat16(), SQUARE)
        expected = ops.gemm(a, b, bias=bias, out=out.clone(), accumulate=True)
    with native.use():
        found = ops.gemm(native.put(a), native.put(b), bias=native.put(bias), out=native.put(out), accumulate=True)
    assert relative_error(found.cpu(), expected.double()) <= 2 * BOUND[torch.float32]


def test_nvfp4_does_not_go_with_another_family(native: NativeBackend) -> None:
    x = torch.ones(32, 128)
    with te_hal.use_backend(REFERENCE):
        pair = quantize(x, PLAIN), ops.quantize(x, dtype=E4M3.dtype, mode="mxfp8", columnwise=True)
    with native.use(), pytest.raises(UnsupportedError, match="quantize both by one recipe"):
        ops.gemm(*(native.put(storage) for storage in pair))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_hadamards_transform_of_anything_but_bf16_is_refused(dtype, native: NativeBackend) -> None:
    with native.use(), pytest.raises(UnsupportedError, match="compute in bf16, or leave the transform out"):
        quantize(native.put(torch.ones(32, 32, dtype=dtype)), HADAMARD)
