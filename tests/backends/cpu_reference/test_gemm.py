"""gemm of cpu_reference against float64, element by element, on both of its ways."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import golden_values
import pytest
import torch
from closeness import FP32_ROUNDING, relative_error, roundings
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_operands import KINDS, columnwise_only, decoded, random_operand, storage

from te_hal.backends.cpu_reference import gemm as module
from te_hal.backends.cpu_reference.amax import amax, compute_scale
from te_hal.backends.cpu_reference.cast import quantize
from te_hal.backends.cpu_reference.gemm import gemm
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ColumnwiseOrder
from te_hal.schema.gemm import GEMM, LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRINGS = [f"{a}-{b}" for a, b in itertools.product(KINDS, KINDS)]
BOUND = GEMM.contract.bound


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operand_shapes(layout: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return {"fprop": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[layout]


def oriented(layout: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (a.t() if layout == "wgrad" else a), (b.t() if layout == "fprop" else b)


def exact_product(layout: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the error that fp32 sums in any order may have."""
    left, right = oriented(layout, a, b)
    return left @ right, (left.abs() @ right.abs()) * (left.shape[1] + 4) * FP32_ROUNDING


@pytest.fixture(params=["short way", "general way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with and without the bf16 short way (which this CPU may not offer)."""
    if request.param == "general way":
        monkeypatch.setattr(module, "_onednn_multiplies_bf16", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_pairing_is_rounded_once(pairing: str, layout: str) -> None:
    generator = seeded()
    (a, exact_a), (b, exact_b) = (
        random_operand(kind, shape, generator)
        for kind, shape in zip(pairing.split("-"), operand_shapes(layout, 33, 48, 65), strict=True)
    )
    exact, fp32_error = exact_product(layout, exact_a, exact_b)
    for out_dtype in FLOATS:
        result = gemm(a, b, layout=layout, out_dtype=out_dtype)
        assert result.dtype == out_dtype
        assert roundings(result, exact, fp32_error) <= 1.0
        assert relative_error(result, exact) <= BOUND[out_dtype]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80)),
    layout=st.sampled_from(LAYOUTS),
    kinds=st.tuples(st.sampled_from(["bf16", "e4m3", "e5m2"]), st.sampled_from(["bf16", "e4m3", "e5m2"])),
    addend=st.sampled_from(["none", "bias", "out"]),
    scale_inv=st.sampled_from([1.0, 0.0123, 1e-15, 1e15]),
    strided=st.booleans(),
    short=st.booleans(),
)
def test_bf16_results_are_rounded_once_whatever_is_added(
    sizes: tuple[int, int, int],
    layout: str,
    kinds: tuple[str, str],
    addend: str,
    scale_inv: float,
    strided: bool,
    short: bool,
) -> None:
    generator = seeded(sum(sizes))
    (a, exact_a), (b, exact_b) = (
        random_operand(kind, shape, generator, scale_inv)
        for kind, shape in zip(kinds, operand_shapes(layout, *sizes), strict=True)
    )
    exact, fp32_error = exact_product(layout, exact_a, exact_b)
    bias = out = None
    if addend == "bias" and layout == "fprop":
        bias = (torch.randn(exact.shape[1], generator=generator).double() * exact.abs().mean()).bfloat16()
        exact = exact + bias.double()
    elif addend == "out":
        out = (torch.randn(exact.shape, generator=generator).double() * exact.abs().mean()).bfloat16()
        exact = exact + out.double()
        if strided:
            out = torch.cat([out, out], 1)[:, : exact.shape[1]]
    fp32_error = fp32_error + exact.abs() * 2 * FP32_ROUNDING
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(module, "_onednn_multiplies_bf16", lambda: False)
        result = gemm(a, b, bias=bias, out=out, layout=layout, accumulate=out is not None, out_dtype=torch.bfloat16)
    assert roundings(result, exact, fp32_error) <= 1.0


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
def test_a_bias_of_any_dtype_is_added_exactly(bias_dtype: torch.dtype, out_dtype: torch.dtype, way: str) -> None:
    """B20: a bf16 bias under an fp32 result was once read as fp32."""
    a = torch.zeros(3, 16, dtype=torch.bfloat16)
    b = torch.ones(16, 16, dtype=torch.bfloat16)
    result = gemm(a, b, bias=torch.arange(16).to(bias_dtype), out_dtype=out_dtype)
    assert torch.equal(result, torch.arange(16).to(out_dtype).expand(3, 16)), way


def test_a_bias_is_not_rounded_before_the_sum() -> None:
    bias = torch.tensor([1.0 + 2.0**-20])
    a, b = torch.tensor([[2.0**-8]], dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    # 1 + 2**-8 + 2**-20 lies above the middle of two bf16 numbers; without the last term it is a tie, and even wins.
    assert gemm(a, b, bias=bias).item() == 1.0 + 2.0**-7


def strided_columns(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, torch.full_like(values, 7.0)], -1)[..., 0]


def left_part(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, torch.full_like(values, 7.0)], 1)[:, : values.shape[1]]


def transposed(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous().t()


@pytest.mark.parametrize("memory", [torch.clone, strided_columns, left_part, transposed])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 24])  # one column, strided: torch 2.7's in-place bf16 addmm is wrong there
def test_accumulates_into_out_of_any_strides(
    memory: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, columns: int, way: str
) -> None:
    generator = seeded()
    (a, exact_a), (b, exact_b) = (random_operand("e4m3", shape, generator) for shape in ((40, 300), (columns, 300)))
    before = torch.randn(40, columns, generator=generator).mul(30).to(dtype)
    out = memory(before)
    exact, fp32_error = exact_product("fprop", exact_a, exact_b)
    exact = exact + before.double()
    assert gemm(a, b, out=out, accumulate=True) is out
    assert roundings(out, exact, fp32_error + exact.abs() * FP32_ROUNDING) <= 1.0, way


def test_what_lies_beside_a_strided_out_is_left_alone() -> None:
    base = torch.full((4, 10), 7.0, dtype=torch.bfloat16)
    gemm(torch.ones(4, 8).bfloat16(), torch.ones(5, 8).bfloat16(), out=base[:, ::2])
    assert torch.equal(base[:, ::2], torch.full((4, 5), 8.0).bfloat16())
    assert torch.equal(base[:, 1::2], torch.full((4, 5), 7.0).bfloat16())


def test_bias_and_accumulate_go_together() -> None:
    a, b = torch.ones(2, 3), torch.ones(4, 3)
    out = torch.full((2, 4), 10.0)
    gemm(a, b, bias=torch.arange(4.0), out=out, accumulate=True)
    assert torch.equal(out, torch.tensor([13.0, 14.0, 15.0, 16.0]).expand(2, 4))


def test_without_accumulate_out_is_overwritten_even_where_it_is_nan(way: str) -> None:
    out = torch.full((2, 4), float("nan"), dtype=torch.bfloat16)
    gemm(torch.ones(2, 3).bfloat16(), torch.ones(4, 3).bfloat16(), out=out)
    assert torch.equal(out, torch.full((2, 4), 3.0).bfloat16()), way


@pytest.mark.parametrize("sizes", [(0, 4, 8), (4, 0, 8), (4, 8, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp32", "e4m3"])
def test_sizes_of_zero_give_the_bias_or_zeros(sizes: tuple[int, int, int], kind: str, way: str) -> None:
    m, n, k = sizes
    (a, _), (b, _) = (random_operand(kind, shape, seeded()) for shape in ((m, k), (n, k)))
    bias = torch.arange(n).bfloat16()
    assert torch.equal(gemm(a, b, out_dtype=torch.bfloat16), torch.zeros(m, n).bfloat16()), way
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=torch.bfloat16), bias.expand(m, n))
    kept = torch.full((m, n), 5.0).bfloat16()
    assert torch.equal(gemm(a, b, out=kept.clone(), accumulate=True), kept)


@pytest.mark.parametrize("order", ColumnwiseOrder)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_columnwise_copy_stands_in_for_a_missing_rowwise_one(layout: str, order: ColumnwiseOrder) -> None:
    generator = seeded()
    (a, _), (b, _) = (random_operand("e4m3", shape, generator) for shape in operand_shapes(layout, 24, 40, 56))
    result = gemm(columnwise_only(a, order), columnwise_only(b, order), layout=layout)
    # Another memory order may change the order of the sums.
    assert relative_error(result, gemm(a, b, layout=layout, out_dtype=torch.float32)) <= BOUND[torch.bfloat16]


def test_the_rowwise_copy_is_read_where_both_exist() -> None:
    codes = torch.full((2, 2), 0x38, dtype=torch.uint8)  # 1.0
    both = storage(codes, E4M3).with_tensors((codes, torch.ones(1), torch.full_like(codes, 0x7F), torch.zeros(1)))
    assert torch.equal(gemm(both, both), torch.full((2, 2), 2.0).bfloat16())


def test_scales_that_overflow_together_keep_a_zero_sum_zero() -> None:
    codes = torch.tensor([[0x00], [0x38]], dtype=torch.uint8)  # 0 and 1
    huge = storage(codes, E4M3, 1e30)
    result = gemm(huge, huge)
    assert torch.equal(result, torch.tensor([[0.0, 0.0], [0.0, float("inf")]]).bfloat16())


def test_scales_that_underflow_together_lose_no_representable_result() -> None:
    codes = torch.full((1, 64), 0x7E, dtype=torch.uint8)  # 448
    a, b = storage(codes, E4M3, 1e-25), storage(codes, E4M3, 1e-16)  # together below the smallest normal number
    exact = torch.tensor([[64 * 448.0**2]]).double() * torch.tensor(1e-25).double() * torch.tensor(1e-16).double()
    result = gemm(a, b, out_dtype=torch.float32)
    assert roundings(result, exact, exact * 4 * FP32_ROUNDING) <= 1.0


def test_a_scale_of_a_nearly_zero_tensor_meets_a_large_one(way: str) -> None:
    codes = torch.full((1, 1), 0x38, dtype=torch.uint8)
    smallest = 1.0 / torch.finfo(torch.float32).max  # below the normal range
    a, b = storage(codes, E4M3, smallest), storage(codes, E5M2, 2.0**100)
    exact = torch.tensor([[smallest * 2.0**100 * 2.0**-1]]).double()  # 0x38 is 0.5 in E5M2
    assert decoded(codes, E5M2).item() == 0.5
    assert roundings(gemm(a, b), exact, exact * 2.0**-20) <= 1.0, way


def test_nan_reaches_the_rows_and_columns_it_belongs_to(way: str) -> None:
    a = torch.full((3, 4), 0x38, dtype=torch.uint8)
    a[1, 2] = 0x7F
    b = torch.full((2, 4), 0x38, dtype=torch.uint8)
    result = gemm(storage(a, E4M3), storage(b, E4M3))
    assert torch.equal(result.isnan(), torch.tensor([[False] * 2, [True] * 2, [False] * 2])), way


@pytest.mark.parametrize("kind", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
def test_long_sums_keep_the_bound(kind: str, draw: Callable[..., torch.Tensor]) -> None:
    values = [draw(64, 8192, generator=seeded(seed)) for seed in (0, 1)]
    if kind == "e4m3":
        codes = [value.to(torch.float8_e4m3fn).view(torch.uint8) for value in values]
        operands, exact = [storage(c, E4M3) for c in codes], [decoded(c, E4M3) for c in codes]
    else:
        operands = [value.to(KINDS[kind]) for value in values]
        exact = [operand.double() for operand in operands]
    for out_dtype in (torch.float32, torch.bfloat16):
        assert relative_error(gemm(*operands, out_dtype=out_dtype), exact[0] @ exact[1].t()) <= BOUND[out_dtype]


def test_the_result_dtype_follows_out_then_a() -> None:
    (a, _), (b, _) = random_operand("e4m3", (2, 4), seeded()), random_operand("fp32", (3, 4), seeded())
    assert gemm(a, b).dtype == torch.bfloat16  # the nominal dtype of the storage
    assert gemm(b, a).dtype == torch.float32
    assert gemm(a, b, out=torch.empty(2, 3, dtype=torch.float16)).dtype == torch.float16


def test_global_precision_flags_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        pytest.fail("a global flag was set")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    before = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    gemm(torch.ones(8, 8), torch.ones(8, 8).bfloat16())
    gemm(torch.ones(8, 8).bfloat16(), torch.ones(8, 8).bfloat16())
    assert before == (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled)


def test_matches_the_recorded_current_scaling_product() -> None:
    recorded = golden_values.load("functional").case("gemm/current")
    x, w = (
        quantize(t, compute_scale(amax(t), fp8_max=E4M3.max), dtype=E4M3.dtype) for t in (recorded["x"], recorded["w"])
    )
    assert relative_error(gemm(x, w, out_dtype=torch.float32), recorded["y"]) <= 3e-4
