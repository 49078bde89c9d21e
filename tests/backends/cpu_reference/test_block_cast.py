"""Casts with a scale per 128 elements or 128x128 square, and back, against brute force and the vectors of the rules."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from block_oracle import BLOCKS, MODES, MX, ROW, SQUARE, assert_holds, decoded, real_scales, spoil_padding

from te_hal.backends.cpu_reference import blocks
from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ColumnwiseOrder, ElementFormat, ScalingMode

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda fmt: fmt.name)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
SHAPES = [(1, 1), (1, 128), (128, 1), (8, 8), (13, 72), (136, 264), (3, 5, 37), (300,), ()]
INF, NAN = math.inf, math.nan


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes over 17 powers of e; every seventh element of any bits, so NaN, infinities and subnormals as well."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.empty(shape).uniform_(-8, 9, generator=generator)
    values = (torch.randn(shape, generator=generator) * spread.exp()).to(dtype).reshape(-1)
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    places = torch.randint(0, values.numel(), (values.numel() // 7,), generator=generator)
    values.view(integer)[places] = torch.randint(
        limits.min, limits.max, places.shape, dtype=integer, generator=generator
    )
    return values.view(shape)


def cast_to(x: torch.Tensor, mode: ScalingMode, format: ElementFormat = E4M3, **flags: object) -> QuantizedStorage:
    return quantize(x, dtype=format.dtype, mode=mode, **{"columnwise": True, **flags})


@FORMATS
@DTYPES
@EVERY_MODE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_copies_hold_what_brute_force_gives(
    shape: tuple[int, ...], mode: ScalingMode, dtype: torch.dtype, format: ElementFormat
) -> None:
    x = draw(shape, dtype)
    storage = cast_to(x, mode, format)
    assert (storage.shape, storage.dtype, storage.format, storage.mode) == (shape, dtype, format, mode)
    assert_holds(storage, x)


@FORMATS
@DTYPES
@pytest.mark.parametrize("mode", [ROW, SQUARE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("epsilon", "pow2"), [(0.0, True), (1e-3, False), (50.0, True)])
def test_epsilon_is_a_floor_and_powers_of_two_are_rounded_down(
    epsilon: float, pow2: bool, mode: ScalingMode, dtype: torch.dtype, format: ElementFormat
) -> None:
    x = draw((13, 264), dtype) * torch.tensor([1e-3, 1.0]).repeat(132).to(dtype)
    assert_holds(cast_to(x, mode, format, amax_epsilon=epsilon, power_of_2=pow2), x, epsilon=epsilon, pow2=pow2)


#: Block (the rest of it is zero), and scale, scale_inv and first codes: the table in docs/numerics.md.
VECTORS = {
    "zero": ([0.0], {}, 1.0, 1.0, "00"),
    "3": ([3.0, -1.5], {}, 149.33333, 0.0066964286, "7E F6"),
    "3, power of 2": ([3.0, -1.5], {"power_of_2": True}, 128.0, 0.0078125, "7C F4"),
    "tiny": ([1e-37], {}, 3.3895314e38, 2.9502597e-39, "60"),
    "infinity": ([INF, 2.0], {}, 1.0, 1.0, "7E 40"),
    "NaN": ([NAN, 2.0], {}, 224.0, 0.004464286, "7F 7E"),
}


@pytest.mark.parametrize("mode", [ROW, SQUARE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("case", VECTORS)
def test_the_written_vectors(case: str, mode: ScalingMode) -> None:
    block, flags, scale, scale_inv, codes = VECTORS[case]
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    x[0, 128 : 128 + len(block)] = torch.tensor(block)
    storage = cast_to(x, mode, **flags)
    found = real_scales(storage.rowwise_scale_inv, mode, (2, 256), rowwise=True)[0, 1]
    assert np.float32(found.item()) == np.float32(1) / np.float32(scale) == np.float32(scale_inv)
    assert storage.rowwise_data[0, 128 : 128 + len(block)].numpy().tobytes() == bytes.fromhex(codes)


@DTYPES
@EVERY_MODE
def test_blocks_of_zeros_stay_zeros(mode: ScalingMode, dtype: torch.dtype) -> None:
    """Case B04: one zero row in a normal tensor, and a tensor of zeros."""
    x = draw((40, 160), dtype).nan_to_num(0.0, 1.0, -1.0).clamp(-1e4, 1e4)
    x[7] = 0.0
    back = dequantize(cast_to(x, mode))
    assert torch.equal(back[7], torch.zeros(160, dtype=dtype))
    assert back.isfinite().all()
    assert torch.equal(dequantize(cast_to(torch.zeros(40, 160, dtype=dtype), mode)), torch.zeros(40, 160, dtype=dtype))


def test_an_fp16_block_of_subnormals_scales_to_the_largest_fp16_number() -> None:
    x = torch.full((1, 128), 2.0**-24, dtype=torch.float16)
    tiny = torch.full((1, 128), 1e-40)
    assert cast_to(x, ROW, E5M2).rowwise_scale_inv[0, 0] == torch.tensor(1.0) / torch.tensor(57344 * 2.0**24)
    assert cast_to(tiny.half(), ROW, E4M3).rowwise_scale_inv[0, 0] == 1.0
    assert cast_to(tiny, ROW, E4M3).rowwise_scale_inv[0, 0] == torch.tensor(1.0) / torch.finfo(torch.float32).max


@EVERY_MODE
def test_a_nan_and_an_infinity_change_their_own_block_alone(mode: ScalingMode) -> None:
    clean = draw((256, 256), torch.bfloat16, seed=1).nan_to_num(0.0, 1.0, -1.0)
    x = clean.clone()
    x[3, 5], x[200, 130] = NAN, INF
    assert_holds(cast_to(x, mode), x)
    found, expected = cast_to(x, mode).rowwise_data, cast_to(clean, mode).rowwise_data
    along = 32 if mode is MX else 128
    rows = slice(128, 256) if mode is SQUARE else slice(200, 201)
    differs = found != expected
    differs[slice(0, 128) if mode is SQUARE else slice(3, 4), :along] = False
    differs[rows, 128 : 128 + along] = False
    assert not differs.any()


@EVERY_MODE
@pytest.mark.parametrize("order", ColumnwiseOrder)
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_a_copy_made_alone_is_the_one_made_with_the_other(copy: str, order: ColumnwiseOrder, mode: ScalingMode) -> None:
    x = draw((70, 200), torch.bfloat16)
    only = cast_to(x, mode, rowwise=copy == "rowwise", columnwise=copy == "columnwise", columnwise_order=order)
    assert (only.rowwise_data is None) == (copy == "columnwise")
    assert_holds(only, x)
    assert_holds(cast_to(x, mode, columnwise_order=order), x)


@EVERY_MODE
@pytest.mark.parametrize("chunk", [1, 1 << 15])
def test_tiles_of_any_size_give_the_same_bytes(chunk: int, mode: ScalingMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    x = draw((300, 420), torch.bfloat16)
    storage = cast_to(x, mode)
    assert len(list(blocks.tiles(300, 420))) == {1: 12, 1 << 15: 6}[chunk]
    assert_holds(storage, x)
    assert torch.equal(dequantize(storage, out_dtype=torch.float32).nan_to_num(5.0), by_hand(storage, rowwise=True))


@EVERY_MODE
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,), (2, 0, 3)], ids=str)
def test_a_tensor_without_elements_has_storages_too(shape: tuple[int, ...], mode: ScalingMode) -> None:
    storage = cast_to(torch.zeros(shape), mode)
    assert storage.shape == shape
    assert dequantize(storage).shape == shape


@EVERY_MODE
def test_views_with_gaps_are_read_as_what_they_show(mode: ScalingMode) -> None:
    base = draw((150, 2 * 140), torch.bfloat16)
    for view in (base[:, ::2], base[10:, 3:140], base.t()):
        assert_holds(cast_to(view, mode), view.clone(memory_format=torch.contiguous_format))


@EVERY_MODE
def test_out_is_refilled_and_its_padding_left_alone(mode: ScalingMode) -> None:
    out = spoil_padding(cast_to(draw((70, 201), torch.bfloat16), mode), byte=0x5A)
    before = [buffer.data_ptr() for buffer in out.tensors()]
    x = draw((70, 201), torch.bfloat16, seed=2)
    assert cast_to(x, mode, out=out) is out
    assert [buffer.data_ptr() for buffer in out.tensors()] == before
    assert_holds(out, x)
    for rowwise, scale_inv in ((True, out.rowwise_scale_inv), (False, out.columnwise_scale_inv)):
        grid = real_scales(scale_inv, mode, (70, 201), rowwise=rowwise)
        padding = scale_inv.numel() - grid.numel()
        grid.fill_(0)
        assert padding > 0
        assert (scale_inv.view(torch.uint8) == 0x5A).sum() == padding * scale_inv.element_size()


def by_hand(storage: QuantizedStorage, *, rowwise: bool) -> torch.Tensor:
    """Every code times its factor, one fp32 product, by ml_dtypes and numpy; NaN shown as 5."""
    codes = storage.rowwise_data if rowwise else storage.columnwise_data
    if not rowwise and storage.columnwise_order == "transposed":
        codes = codes.t()
    scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    grid = real_scales(scale_inv, storage.mode, storage.shape, rowwise=rowwise)
    factors = torch.exp2(grid.double() - 127).float() if storage.mode is MX else grid
    down, along = BLOCKS[storage.mode, rowwise]
    whole = factors.repeat_interleave(down, 0).repeat_interleave(along, 1)[: codes.shape[0], : codes.shape[1]]
    values = torch.from_numpy(decoded(codes.contiguous().numpy(), storage.format)).float()
    return (values * whole).nan_to_num(5.0)


@FORMATS
@EVERY_MODE
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_dequantizing_is_one_product_and_one_rounding(
    out_dtype: torch.dtype, mode: ScalingMode, format: ElementFormat
) -> None:
    x = draw((136, 264), torch.float32)
    for order, rowwise in itertools.product(ColumnwiseOrder, [True, False]):
        storage = cast_to(x, mode, format, rowwise=rowwise, columnwise=not rowwise, columnwise_order=order)
        found = dequantize(spoil_padding(storage), out_dtype=out_dtype)
        assert found.dtype == out_dtype
        assert torch.equal(found.nan_to_num(5.0), by_hand(storage, rowwise=rowwise).to(out_dtype).nan_to_num(5.0))


def test_the_rowwise_copy_is_decoded_where_there_are_both() -> None:
    storage = cast_to(draw((40, 160), torch.bfloat16), ROW)
    rowwise = storage.keep(rowwise=True, columnwise=False)
    assert torch.equal(dequantize(storage).nan_to_num(5.0), dequantize(rowwise).nan_to_num(5.0))


def test_a_tensor_that_needs_a_gradient_is_read_as_data() -> None:
    x = draw((8, 128), torch.float32).requires_grad_()
    assert_holds(cast_to(x, ROW), x.detach())
