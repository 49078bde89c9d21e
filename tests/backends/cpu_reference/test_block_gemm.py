"""Products of operands with a scale per block against float64, on both ways of cpu_reference's gemm (rule B5)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from block_oracle import MODES, MX, ROW, SQUARE, cast, spoil_padding
from closeness import FP32_ROUNDING, relative_error, roundings

import te_hal
from te_hal import ops
from te_hal.backends.cpu_reference import gemm as module
from te_hal.backends.cpu_reference.block_operand import is_exact_in_bf16
from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.backends.cpu_reference.gemm import gemm
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

BOUND = GEMM.contract.bound
SHAPES = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}
#: Whether the rowwise copies of a and b have their blocks along the sum.
ROWWISE = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
#: Pairings by what the operands are; None is a plain bf16 tensor.
PAIRINGS = [(a, b) for a, b in itertools.product((ROW, SQUARE, None), repeat=2) if a or b]
PAIRINGS += [(MX, MX), (MX, None), (None, MX)]
NAMED = pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pair: "-".join(m.value if m else "bf16" for m in pair))


def make(
    shape: tuple[int, int], mode: ScalingMode | None, seed: int, *, read_rowwise: bool, format: ElementFormat = E4M3,
    pow2: bool = False, **copies: object,
) -> tuple[torch.Tensor | QuantizedStorage, torch.Tensor]:  # fmt: skip
    """An operand, and in float64 what its copy stands for, by brute force; magnitudes differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.empty(-(-shape[0] // 16), -(-shape[1] // 16)).uniform_(-6, 6, generator=generator).exp()
    spread = spread.repeat_interleave(16, 0).repeat_interleave(16, 1)[: shape[0], : shape[1]]
    x = (torch.randn(shape, generator=generator) * spread).bfloat16()
    if mode is None:
        return x, x.double()
    flags = {"columnwise": True, "power_of_2": pow2 and mode is not MX, **copies}
    held = cast(x, mode, format, rowwise=read_rowwise, pow2=pow2)
    return quantize(x, dtype=format.dtype, mode=mode, **flags), torch.from_numpy(held.values)


def product(layout: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and what fp32 sums of rounded products may be off by."""
    left, right = (a.t() if layout == "wgrad" else a), (b.t() if layout == "fprop" else b)
    return left @ right, (left.abs() @ right.abs()) * (left.shape[1] + 8) * FP32_ROUNDING


@pytest.fixture(params=["short way", "general way"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_onednn_multiplies_bf16", lambda: request.param == "short way")


@pytest.mark.usefixtures("_way")
@NAMED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pow2", [True, False], ids=["powers of 2", "fp32 scales"])
def test_every_pairing_reads_the_blocks_along_the_sum_and_rounds_once(
    pow2: bool, layout: str, pairing: tuple[ScalingMode | None, ScalingMode | None]
) -> None:
    shapes = SHAPES[layout](136, 72, 264)
    (a, exact_a), (b, exact_b) = (
        make(shape, mode, seed, read_rowwise=rowwise, pow2=pow2)
        for shape, mode, seed, rowwise in zip(shapes, pairing, (0, 1), ROWWISE[layout], strict=True)
    )
    exact, fp32_error = product(layout, exact_a, exact_b)
    for out_dtype in FLOATS:
        result = gemm(a, b, layout=layout, out_dtype=out_dtype)
        if out_dtype is torch.float16:
            result, exact16 = result.clamp(-6e4, 6e4), exact.clamp(-6e4, 6e4)
            assert roundings(result, exact16, fp32_error) <= 1.0
            continue
        assert roundings(result, exact, fp32_error) <= 1.0
        assert relative_error(result, exact) <= BOUND[out_dtype]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
@pytest.mark.parametrize("order", ColumnwiseOrder)
def test_a_single_copy_is_read_wherever_its_blocks_lie(
    order: ColumnwiseOrder, copy: str, layout: str, mode: ScalingMode
) -> None:
    rowwise = copy == "rowwise"
    copies = {"rowwise": rowwise, "columnwise": not rowwise, "columnwise_order": order}
    (a, exact_a), (b, exact_b) = (
        make(shape, mode, seed, read_rowwise=rowwise, format=E5M2, **copies)
        for shape, seed in zip(SHAPES[layout](40, 150, 70), (0, 1), strict=True)
    )
    exact, fp32_error = product(layout, exact_a, exact_b)
    result = gemm(spoil_padding(a), spoil_padding(b), layout=layout, out_dtype=torch.float32)  # type: ignore[arg-type]
    assert roundings(result, exact, fp32_error) <= 1.0


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_bias_and_accumulation_are_added_before_the_one_rounding(mode: ScalingMode, out_dtype: torch.dtype) -> None:
    (a, exact_a), (b, exact_b) = (
        make(shape, mode, seed, read_rowwise=True, pow2=True) for shape, seed in (((40, 160), 0), ((24, 160), 1))
    )
    exact, fp32_error = product("fprop", exact_a, exact_b)
    bias, before = torch.randn(24).to(out_dtype), torch.randn(40, 24).to(out_dtype)
    with_bias = gemm(a, b, bias=bias, out_dtype=out_dtype)
    assert roundings(with_bias, exact + bias.double(), fp32_error + exact.abs() * 2 * FP32_ROUNDING) <= 1.0
    out = before.clone()
    assert gemm(a, b, out=out, accumulate=True) is out
    assert roundings(out, exact + before.double(), fp32_error + exact.abs() * 2 * FP32_ROUNDING) <= 1.0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_the_short_way_is_taken_where_factors_are_powers_of_two_and_no_value_is_lost(mode: ScalingMode) -> None:
    x = torch.randn(150, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, :32], x[32:64] = 0.0, 0.0
    pow2 = mode is not MX
    for copies in ({"rowwise": True}, {"rowwise": False, "columnwise": True}):
        storage = quantize(x, dtype=E4M3.dtype, mode=mode, power_of_2=pow2, **copies)
        assert is_exact_in_bf16(storage, rowwise=True)
        assert torch.equal(
            dequantize(storage, out_dtype=torch.bfloat16).float(), dequantize(storage, out_dtype=torch.float32)
        )


INEXACT = {
    "fp32 scales": (ROW, torch.randn(4, 256, generator=torch.Generator().manual_seed(0)), {}),
    "values beside zeros that bf16 units would flush": (MX, torch.full((4, 64), 2.0**-120), {}),
    "factors beyond the range": (MX, torch.full((4, 64), 2.0**127), {}),
}


@pytest.mark.parametrize("case", INEXACT)
def test_other_blocks_take_the_general_way(case: str) -> None:
    mode, x, flags = INEXACT[case]
    storage = quantize(x, dtype=E4M3.dtype, mode=mode, columnwise=True, **flags)
    assert not is_exact_in_bf16(storage, rowwise=True)
    assert not is_exact_in_bf16(storage, rowwise=False)


def test_tiny_values_meet_large_ones_without_loss() -> None:
    tiny, huge = torch.full((8, 32), 2.0**-124), torch.full((8, 32), 2.0**110)
    a, b = (quantize(x.bfloat16(), dtype=E4M3.dtype, mode=MX) for x in (tiny, huge))
    assert torch.equal(gemm(a, b), torch.full((8, 8), 2.0**-9).bfloat16())


@pytest.mark.usefixtures("_way")
def test_a_nan_reaches_its_row_alone_and_an_infinity_saturates() -> None:
    x = torch.ones(3, 256).bfloat16()
    x[1, 200], x[2, 7] = float("nan"), float("inf")
    for mode in MODES:
        a = quantize(x, dtype=E4M3.dtype, mode=mode)
        result = gemm(a, torch.ones(5, 256).bfloat16())
        assert torch.equal(result.isnan(), torch.tensor([[False], [True], [False]]).expand(3, 5)), mode
        assert torch.equal(result[2].isinf(), torch.full((5,), mode is MX)), mode  # 448 * 2**127 is none in fp32


@pytest.mark.parametrize("sizes", [(0, 4, 8), (4, 0, 8), (4, 8, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_sizes_of_zero_give_zeros(mode: ScalingMode, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = (quantize(torch.zeros(shape).bfloat16(), dtype=E4M3.dtype, mode=mode) for shape in ((m, k), (n, k)))
    assert torch.equal(gemm(a, b, out_dtype=torch.float32), torch.zeros(m, n))


FAMILIES = [(ROW, MX), (SQUARE, MX), (ScalingMode.TENSOR, ROW), (ScalingMode.TENSOR, MX)]


@pytest.mark.parametrize("backend", ["cpu_reference", "null"])
@pytest.mark.parametrize("pair", FAMILIES, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_families_do_not_mix_in_one_product(pair: tuple[ScalingMode, ScalingMode], backend: str) -> None:
    x = torch.ones(32, 128)
    scales = [torch.ones(1) if mode is ScalingMode.TENSOR else None for mode in pair]
    a, b = (quantize(x, scale, dtype=E4M3.dtype, mode=mode) for scale, mode in zip(scales, pair, strict=True))
    for operands in ((a, b), (b, a)):
        with (
            te_hal.use_backend(backend),
            pytest.raises(UnsupportedError, match=r"'[a-z0-9_]+' and '[a-z0-9_]+'; quantize both by one recipe"),
        ):
            ops.gemm(*operands)
