"""Scales per block: casts give the bytes of cpu_reference and of the recordings, products stay within their bound."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import golden_values
import pytest
import torch
from block_oracle import MODES, MX, ROW, SQUARE, cast, real_scales, spoil_padding
from closeness import FP32_ROUNDING, relative_error, roundings
from native_backends import same

import te_hal
from te_hal import ops
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS

if TYPE_CHECKING:
    from native_backends import NativeBackend

    from te_hal.schema.storage import QuantizedStorage

REFERENCE = "cpu_reference"
RECORDED = golden_values.load("quantizers")
BOUND = GEMM.contract.bound
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
SHAPES = [(1, 1), (1, 128), (8, 8), (13, 37), (3, 5, 7), (129,), (), (136, 264), (600, 520)]
EMPTY = [(0, 16), (16, 0), (0,)]
COPIES = [(True, False, "transposed"), (False, True, "transposed"), (True, True, "transposed"), (True, True, "same")]
#: Whether the copies that have their blocks along the sum are the rowwise ones, of a and b.
ROWWISE = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes over 17 powers of e, and every seventh element of any bits."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.empty(shape).uniform_(-8, 9, generator=generator)
    values = (torch.randn(shape, generator=generator) * spread.exp()).to(dtype).reshape(-1)
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    places = torch.randint(0, max(values.numel(), 1), (values.numel() // 7,), generator=generator)
    bits = torch.randint(limits.min, limits.max, places.shape, dtype=integer, generator=generator)
    values.view(integer)[places] = bits
    return values.view(shape)


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grids(storage: QuantizedStorage) -> list[torch.Tensor]:
    """The factors of both copies, without padding."""
    rows = 1
    for size in storage.shape[:-1]:
        rows *= size
    shape = (rows, storage.shape[-1] if storage.shape else 1)
    given = ((True, storage.rowwise_scale_inv), (False, storage.columnwise_scale_inv))
    return [
        real_scales(scale_inv.cpu(), storage.mode, shape, rowwise=rowwise).reshape(-1).clone()
        for rowwise, scale_inv in given
        if scale_inv is not None
    ]


def assert_same_storage(found: QuantizedStorage, expected: QuantizedStorage) -> None:
    assert found.kind is expected.kind
    assert found.shape == expected.shape
    assert same(found.rowwise_data, expected.rowwise_data)
    assert same(found.columnwise_data, expected.columnwise_data)
    assert all(itertools.starmap(same, zip(grids(found), grids(expected), strict=True)))


def assert_same_cast(
    native: NativeBackend, x: torch.Tensor, mode: ScalingMode, target: ElementFormat, **flags: object
) -> None:
    flags = {"dtype": target.dtype, "mode": mode, **flags}
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(x, **flags)  # type: ignore[arg-type]
        decoded = ops.dequantize(expected)
    with native.use():
        found = ops.quantize(native.put(x), **flags)  # type: ignore[arg-type]
        back = ops.dequantize(found)
    assert_same_storage(found, expected)
    assert same(back.reshape(-1), decoded.reshape(-1))


def assert_same_casts(native: NativeBackend, x: torch.Tensor, mode: ScalingMode) -> None:
    for target, (rowwise, columnwise, order) in itertools.product((E4M3, E5M2), COPIES):
        copies = {"rowwise": rowwise, "columnwise": columnwise, "columnwise_order": order}
        assert_same_cast(native, x, mode, target, **copies)


@EVERY_MODE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_dequantize_in_every_order_of_threads(
    shape: tuple[int, ...], mode: ScalingMode, ordered: NativeBackend
) -> None:
    assert_same_casts(ordered, draw(shape, torch.bfloat16), mode)


@EVERY_MODE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_dequantize_of_every_dtype(
    shape: tuple[int, ...], dtype: torch.dtype, mode: ScalingMode, native: NativeBackend
) -> None:
    assert_same_casts(native, draw(shape, dtype), mode)


@EVERY_MODE
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_tensor_without_elements(shape: tuple[int, ...], mode: ScalingMode, native: NativeBackend) -> None:
    assert_same_cast(native, torch.zeros(shape), mode, E4M3, columnwise=True)


@pytest.mark.parametrize("mode", [ROW, SQUARE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("epsilon", "pow2"), [(0.0, True), (1e-3, False), (50.0, True), (1e-40, False)])
def test_floors_and_powers_of_two(
    epsilon: float, pow2: bool, dtype: torch.dtype, mode: ScalingMode, native: NativeBackend
) -> None:
    x = torch.cat([draw((40, 128), dtype), draw((40, 100), dtype, 1) * 1e-4, torch.zeros(40, 64, dtype=dtype)], 1)
    assert_same_cast(native, x, mode, E4M3, columnwise=True, amax_epsilon=epsilon, power_of_2=pow2)


@EVERY_MODE
@pytest.mark.parametrize("value", [1e-40, 2.0**-126, 3e38, float("inf"), float("-inf"), float("nan"), -0.0])
def test_blocks_of_one_value(value: float, mode: ScalingMode, native: NativeBackend) -> None:
    assert_same_cast(native, torch.full((136, 264), value), mode, E5M2, columnwise=True)


@EVERY_MODE
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_views_that_start_anywhere(offset: int, mode: ScalingMode, native: NativeBackend) -> None:
    buffer = draw((offset + 40 * 136,), torch.bfloat16)
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(buffer[offset:].view(40, 136), dtype=E4M3.dtype, mode=mode, columnwise=True)
    with native.use():
        found = ops.quantize(native.put(buffer)[offset:].view(40, 136), dtype=E4M3.dtype, mode=mode, columnwise=True)
    assert_same_storage(found, expected)


@EVERY_MODE
@pytest.mark.parametrize("order", ColumnwiseOrder)
def test_a_storage_is_refilled_wherever_its_buffers_lie(
    order: ColumnwiseOrder, mode: ScalingMode, native: NativeBackend
) -> None:
    flags = {"dtype": E4M3.dtype, "mode": mode, "columnwise": True, "columnwise_order": order}
    x = draw((70, 201), torch.bfloat16)
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(x, **flags)  # type: ignore[arg-type]
        out = native.put(spoil_padding(ops.quantize(draw((70, 201), torch.bfloat16, 1), **flags), 0x5A))  # type: ignore[arg-type]
    for name in ("rowwise_data", "columnwise_data"):
        codes = getattr(out, name)
        apart = torch.zeros(*codes.shape, 2, dtype=torch.uint8, device=codes.device)[..., 0]
        setattr(out, name, apart)
    out.rowwise_scale_inv = native.put(out.rowwise_scale_inv.repeat(2, 1))[::2]
    with native.use():
        assert ops.quantize(native.put(x), out=out, **flags) is out  # type: ignore[arg-type]
    assert_same_storage(out, expected)
    untouched = out.columnwise_scale_inv.cpu()
    real_scales(untouched, mode, (70, 201), rowwise=False).fill_(0)
    assert set(untouched.view(torch.uint8).unique().tolist()) == {0, 0x5A}


@pytest.mark.parametrize("case", RECORDED.cases("block/"))
def test_the_recorded_bytes(case: str, ordered: NativeBackend) -> None:
    recorded, mode = RECORDED.case(case), ROW if "dim=1" in case else SQUARE
    x = recorded["x"]
    with ordered.use():
        found = ops.quantize(
            ordered.put(x), dtype=E4M3.dtype, mode=mode, columnwise=True, power_of_2="pow2=True" in case
        )
    for rowwise, name in ((True, "rowwise"), (False, "columnwise")):
        assert same(getattr(found, f"{name}_data"), recorded[f"{name}_data"])
        scales = getattr(found, f"{name}_scale_inv").cpu(), recorded[f"{name}_scale_inv"]
        kept = [real_scales(s, mode, (x.shape[0], x.shape[1]), rowwise=rowwise).reshape(-1).clone() for s in scales]
        assert same(*kept)


PAIRINGS = [(a, b) for a, b in itertools.product((ROW, SQUARE, None), repeat=2) if a or b]
PAIRINGS += [(MX, MX), (MX, None), (None, MX)]


@pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pair: "-".join(m.value if m else "bf16" for m in pair))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ColumnwiseOrder)
def test_a_product_reads_the_blocks_along_the_sum(
    order: ColumnwiseOrder,
    layout: str,
    pairing: tuple[ScalingMode | None, ScalingMode | None],
    native: NativeBackend,
) -> None:
    m, n, k = 136, 72, 264
    shapes = {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[layout]
    given, values = [], []
    for seed, (shape, mode, rowwise) in enumerate(zip(shapes, pairing, ROWWISE[layout], strict=True)):
        x = normal(shape, seed).bfloat16()
        if mode is None:
            given.append(native.put(x))
            values.append(x.double())
            continue
        with native.use():
            storage = ops.quantize(native.put(x), dtype=E4M3.dtype, mode=mode, columnwise=True, columnwise_order=order)
        given.append(native.put(spoil_padding(native_on_host(storage))))
        values.append(torch.from_numpy(cast(x, mode, E4M3, rowwise=rowwise).values))
    left, right = (
        (values[0].t() if layout == "wgrad" else values[0]),
        (values[1].t() if layout == "fprop" else values[1]),
    )
    exact = left @ right
    fp32_error = (left.abs() @ right.abs()) * (left.shape[1] + 8) * FP32_ROUNDING
    for out_dtype in FLOATS:
        with native.use():
            result = ops.gemm(*given, layout=layout, out_dtype=out_dtype).cpu()
        assert relative_error(result, exact) <= BOUND[out_dtype]
        assert native.name == "cuda" or roundings(result, exact, fp32_error) <= 1.0


def native_on_host(storage: QuantizedStorage) -> QuantizedStorage:
    return storage.with_tensors(tuple(None if t is None else t.cpu() for t in storage.tensors()))


@EVERY_MODE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_a_single_copy_serves_every_layout(copy: str, layout: str, mode: ScalingMode, native: NativeBackend) -> None:
    shapes = {"fprop": ((40, 70), (150, 70)), "dgrad": ((40, 150), (150, 70)), "wgrad": ((40, 150), (40, 70))}[layout]
    flags = {"dtype": E5M2.dtype, "mode": mode, "rowwise": copy == "rowwise", "columnwise": copy == "columnwise"}
    with te_hal.use_backend(REFERENCE):
        operands = [ops.quantize(normal(shape, seed), **flags) for seed, shape in enumerate(shapes)]  # type: ignore[arg-type]
        expected = ops.gemm(*operands, layout=layout, out_dtype=torch.float32)
    with native.use():
        found = ops.gemm(*(native.put(x) for x in operands), layout=layout, out_dtype=torch.float32)
    assert relative_error(found.cpu(), expected.double()) <= 2 * BOUND[torch.float32]


def test_bias_and_accumulation(native: NativeBackend) -> None:
    x, w, bias, out = (normal(shape, seed) for seed, shape in enumerate([(40, 160), (24, 160), (24,), (40, 24)]))
    with te_hal.use_backend(REFERENCE):
        a, b = (ops.quantize(t, dtype=E4M3.dtype, mode=m) for t, m in ((x, ROW), (w, SQUARE)))
        expected = ops.gemm(a, b, bias=bias, out=out.clone(), accumulate=True)
    with native.use():
        given = native.put(a), native.put(b)
        found = ops.gemm(*given, bias=native.put(bias), out=native.put(out), accumulate=True)
    assert relative_error(found.cpu(), expected.double()) <= 2 * BOUND[torch.float32]


@pytest.mark.parametrize("pair", [(ROW, MX), (ScalingMode.TENSOR, SQUARE)], ids=str)
def test_families_do_not_mix(pair: tuple[ScalingMode, ScalingMode], native: NativeBackend) -> None:
    x = torch.ones(32, 128)
    with te_hal.use_backend(REFERENCE):
        scales = [torch.ones(1) if mode is ScalingMode.TENSOR else None for mode in pair]
        operands = [ops.quantize(x, s, dtype=E4M3.dtype, mode=m) for s, m in zip(scales, pair, strict=True)]
    with native.use(), pytest.raises(UnsupportedError, match="quantize both by one recipe"):
        ops.gemm(*(native.put(storage) for storage in operands))
