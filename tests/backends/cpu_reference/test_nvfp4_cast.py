"""NVFP4 casts against recorded bytes, and against loops with ml_dtypes where nothing was recorded."""

from __future__ import annotations

import math

import golden_values
import numpy as np
import nvfp4_by_hand
import pytest
import torch

from te_hal import ops
from te_hal.backends.cpu_reference import blocks, chunks
from te_hal.schema.block_scales import block_copy
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import E2M1, E4M3, ScalingMode
from te_hal.schema.nvfp4_layout import AMAX_BYTES, tensor_amax
from te_hal.schema.storage import QuantizedStorage

RECORDED = golden_values.load("quantizers")
PLAIN, SQUARE, HADAMARD = ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def quantize(x: torch.Tensor, mode: ScalingMode = PLAIN, **flags: object) -> QuantizedStorage:
    return ops.quantize(x, dtype=E2M1.dtype, mode=mode, **{"columnwise": True, **flags})  # type: ignore[arg-type]


def wide(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many binades, some rows and columns small, zeros among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 3)
    return x.masked_fill(torch.rand(shape, generator=generator) < 0.05, 0.0).to(dtype)


def assert_copy(storage: QuantizedStorage, expected: nvfp4_by_hand.Copy, *, rowwise: bool) -> None:
    copy = block_copy(storage, rowwise=rowwise)
    grid = copy.grid if rowwise else copy.grid.t()
    assert torch.equal(grid, torch.from_numpy(expected.scales))
    assert torch.equal(copy.codes.reshape(expected.codes.shape[0], -1), expected.packed())
    scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    assert tensor_amax(scale_inv).item() == expected.amax


def test_codes_and_scales_are_the_recorded_bytes() -> None:
    (case,) = RECORDED.cases("nvfp4ref/")
    recorded = RECORDED.case(case)
    storage = quantize(recorded["x"])
    for name, turned, rowwise in (("data", "row", True), ("data_t", "col", False)):
        copy = block_copy(storage, rowwise=rowwise)
        grid = copy.grid if rowwise else copy.grid.t()
        assert torch.equal(copy.codes, recorded[name])
        assert torch.equal(grid, recorded[name.replace("data", "scale")])
        scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
        assert torch.equal(tensor_amax(scale_inv), recorded[f"global_amax_{turned}"])


@FLOATS
@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (2, 8, 48)], ids=str)
@pytest.mark.parametrize("mode", [PLAIN, SQUARE])
def test_both_copies_are_what_loops_give(mode: ScalingMode, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = wide(*shape, dtype=dtype)
    storage, rows = quantize(x, mode), x.reshape(-1, shape[-1])
    assert_copy(storage, nvfp4_by_hand.cast(rows, square=mode is SQUARE), rowwise=True)
    assert_copy(storage, nvfp4_by_hand.cast(rows.t(), square=mode is SQUARE), rowwise=False)


@pytest.mark.parametrize("shape", [(32, 16), (2, 24, 32)], ids=str)
def test_hadamards_transform_is_that_of_the_matrix_and_leaves_the_rowwise_copy_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    storage, rows = quantize(x, HADAMARD), x.reshape(-1, shape[-1])
    assert_copy(storage, nvfp4_by_hand.cast(rows), rowwise=True)
    assert_copy(storage, nvfp4_by_hand.cast(nvfp4_by_hand.hadamard(rows.t())), rowwise=False)


def test_a_single_element_is_spread_over_its_group_by_the_transform() -> None:
    x = torch.zeros(16, 16)
    x[3, 5] = 8.0
    storage = quantize(x.bfloat16(), HADAMARD, rowwise=False)
    codes = torch.from_numpy(nvfp4_by_hand.cast(nvfp4_by_hand.hadamard(x.t())).codes)
    assert set(codes[5].tolist()) == {7, 15}  # +6 and -6
    assert torch.equal(ops.dequantize(storage), x.bfloat16())


INF, NAN = math.inf, math.nan
HARD = {
    "zero": [0.0, -0.0],
    "a zero block beside others": [0.0] * 16 + [1.0, -2.0],
    "subnormal": [1e-40, -3e-41],
    "tiny": [1e-30, -7e-31, 3e-38],
    "huge": [3e38, -1e38, 5.0],
    "inf": [INF, 1.0, 0.0],
    "NaN": [NAN, 3.0, -1.5],
    "all NaN": [NAN] * 256,
    "a block that the tensor's scale takes to zero": [1e-6] * 16 + [1e6],
    "ties": [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5],
    "next to a tie": [6.0, 0.25000003, 0.24999999, 5.0000005, 4.9999995],
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("mode", [PLAIN, SQUARE])
def test_hard_blocks_are_what_loops_give(mode: ScalingMode, name: str) -> None:
    x = torch.zeros(16 * 32)
    x[: len(HARD[name])] = torch.tensor(HARD[name])
    x = x.view(16, 32)
    storage = quantize(x, mode)
    assert_copy(storage, nvfp4_by_hand.cast(x, square=mode is SQUARE), rowwise=True)
    assert_copy(storage, nvfp4_by_hand.cast(x.t(), square=mode is SQUARE), rowwise=False)


def test_what_hard_blocks_decode_to() -> None:
    """Cases B02, B04: zeros stay, a NaN becomes its block's largest value, and an infinity spoils the whole tensor."""

    def back(values: list[float]) -> list[float]:
        x = torch.zeros(16, 16)
        x[0, : len(values)] = torch.tensor(values)
        return ops.dequantize(quantize(x))[0, : len(values)].tolist()

    assert back([0.0, -0.0]) == [0.0, 0.0]
    assert back([NAN, 3.0, -1.5]) == pytest.approx([3.0, 3.0, -1.5], rel=1e-6)
    assert back([3e38, -1e38]) == pytest.approx([3e38, -1e38], rel=1e-6)
    assert back([6e-37, -3e-37]) == pytest.approx([6e-37, -3e-37], rel=1e-3)
    assert not any(map(math.isfinite, back([INF, 1.0, 0.0])))


@FLOATS
def test_dequantizing_is_code_times_scales_rounded_once(dtype: torch.dtype) -> None:
    x = wide(32, 48, dtype=dtype)
    for mode in (PLAIN, SQUARE):
        storage = quantize(x, mode)
        turned = storage.keep(rowwise=False, columnwise=True)
        for lines, back in ((x, ops.dequantize(storage)), (x.t(), ops.dequantize(turned).t())):
            exact = torch.from_numpy(nvfp4_by_hand.cast(lines, square=mode is SQUARE).values())
            assert back.dtype == dtype
            assert torch.allclose(back.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-30)


def test_a_columnwise_copy_alone_decodes_to_the_input_also_after_the_transform() -> None:
    """Case B59: shape, size, no rowwise buffer."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    for mode in (PLAIN, SQUARE, HADAMARD):
        storage = quantize(x, mode, rowwise=False)
        assert (storage.shape, storage.rowwise_data, storage.rowwise_scale_inv) == ((128, 256), None, None)
        error = (ops.dequantize(storage).float() - x.float()).norm() / x.float().norm()
        assert error < 0.13


def test_codes_survive_decoding_and_encoding() -> None:
    """Case B02: all codes, both zeros with their sign."""
    x = torch.arange(16, dtype=torch.uint8).repeat(16, 1)
    values = torch.from_numpy(
        nvfp4_by_hand.Copy(x.numpy(), np.full((16, 1), 0x38, np.uint8), np.float32(2688)).values()
    )
    storage = quantize((values * 448).float(), columnwise=False)
    assert torch.equal(storage.rowwise_data, x[:, ::2] | (x[:, 1::2] << 4))


def test_what_lies_in_the_padding_of_scales_is_never_read() -> None:
    """Case B13."""
    x = wide(48, 32)
    before = quantize(x, SQUARE)
    spoilt = before.with_tensors(tuple(t.clone() for t in before.tensors() if t is not None))
    for rowwise in (True, False):
        scale_inv = spoilt.rowwise_scale_inv if rowwise else spoilt.columnwise_scale_inv
        real = block_copy(spoilt, rowwise=rowwise).grid.clone()
        scale_inv[:-AMAX_BYTES] = 0xFF
        block_copy(spoilt, rowwise=rowwise).grid.copy_(real)
    for layout in ("fprop", "dgrad", "wgrad"):
        other = torch.randn({"fprop": (16, 32), "dgrad": (16, 48), "wgrad": (48, 16)}[layout])
        assert torch.equal(ops.gemm(other, spoilt, layout=layout), ops.gemm(other, before, layout=layout))
    assert torch.equal(ops.dequantize(spoilt), ops.dequantize(before))


@pytest.mark.parametrize("mode", [PLAIN, SQUARE, HADAMARD])
def test_the_size_of_the_pieces_does_not_show(mode: ScalingMode, monkeypatch: pytest.MonkeyPatch) -> None:
    x = wide(272, 400)
    flags = {} if mode is SQUARE else {"rounding_seed": 7}
    whole = quantize(x, mode, **flags)
    for module in (blocks, chunks):
        monkeypatch.setattr(module, "CHUNK", 1 << 14)
    for a, b in zip(quantize(x, mode, **flags).tensors()[::2], whole.tensors()[::2], strict=True):
        assert torch.equal(a, b)


def test_a_storage_is_refilled_in_place() -> None:
    first, second = quantize(wide(32, 32)), wide(32, 32) * 3
    assert quantize(second, out=first) is first
    assert torch.equal(ops.dequantize(first), ops.dequantize(quantize(second)))


@pytest.mark.parametrize(
    ("shape", "name"),
    [((16, 24), "the last size is 24"), ((3, 8, 32), "the product of the leading sizes is 24"), ((16,), "sizes is 1")],
    ids=str,
)
def test_sizes_that_blocks_do_not_divide_are_refused_with_the_multiple(shape: tuple[int, ...], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"NVFP4: got shape .*{name}; accepted: multiples of 16.*pad it to"):
        quantize(torch.ones(shape))


@pytest.mark.parametrize("shape", [(0, 32), (16, 0)], ids=str)
def test_empty_tensors_have_an_amax_of_zero(shape: tuple[int, ...]) -> None:
    storage = quantize(torch.ones(shape))
    assert tensor_amax(storage.rowwise_scale_inv).item() == 0.0
    assert ops.dequantize(storage).shape == shape


WRONG = {
    "E4M3 codes": ({"dtype": E4M3.dtype}, "E2M1 codes, two a byte"),
    "E2M1 per tensor": ({"mode": "tensor"}, "E2M1 codes, two a byte"),
    "rowwise order": ({"columnwise_order": "same"}, "lies transposed"),
    "a seed with squares": ({"mode": SQUARE, "rounding_seed": 1}, "goes with modes 'nvfp4' and 'nvfp4_hadamard'"),
    "a seed below 0": ({"rounding_seed": -1}, "an int from 0"),
    "a seed beyond 64 bits": ({"rounding_seed": 2**64}, "an int from 0"),
    "a floor": ({"amax_epsilon": 1.0}, "go with modes 'block_1x128'"),
    "a scale": ({"scale": torch.ones(1)}, "blocks find their own scales"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_do_not_go_together_are_refused(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(ArgumentError, match=message):
        ops.quantize(torch.ones(16, 16), **{"dtype": E2M1.dtype, "mode": PLAIN, "columnwise": True, **change})


def test_the_transform_takes_bf16_alone() -> None:
    with pytest.raises(UnsupportedError, match=r"takes torch\.bfloat16, not torch\.float32"):
        quantize(torch.ones(16, 16), HADAMARD)
    assert quantize(torch.ones(16, 16), HADAMARD, columnwise=False).kind.rowwise


def test_a_storage_with_the_codes_of_another_mode_is_refused() -> None:
    given = quantize(torch.ones(16, 16))
    fields = {name: getattr(given, name) for name in QuantizedStorage.__slots__ if name not in ("device", "kind")}
    with pytest.raises(ArgumentError, match="'nvfp4' with E4M3 codes"):
        QuantizedStorage(**{**fields, "format": E4M3})
    with pytest.raises(ArgumentError, match=r"rowwise_data: got .*accepted: a torch.uint8 tensor of shape \(16, 8\)"):
        QuantizedStorage(**{**fields, "rowwise_data": torch.zeros(16, 16, dtype=torch.uint8)})
