"""Products by block through the vendors' functions, on CPU tensors with stand-ins for these, against float64.

The stand-ins check what the functions are documented to take. The library is the emulator's, which dequantizes and
transposes. That the real ones agree, only their hardware can show.
"""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import native_backends
import pytest
import torch
from block_oracle import MX, ROW, SQUARE, cast
from closeness import relative_error

from te_hal.backends.cpu_reference.cast import quantize
from te_hal.backends.cuda import block_gemm
from te_hal.backends.musa import groupwise
from te_hal.ffi.marshalling.gemm_choice import VendorGemm, Way
from te_hal.ffi.native import native_of
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.schema.gemm import GEMM, LAYOUTS
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.ffi.native import Native

BOUND = GEMM.contract.bound
BF16, FP32 = torch.bfloat16, torch.float32
ROWWISE = {"fprop": (True, True), "dgrad": (True, False), "wgrad": (False, False)}
SHAPES = {
    "fprop": lambda m, n, k: ((m, k), (n, k)),
    "dgrad": lambda m, n, k: ((m, n), (n, k)),
    "wgrad": lambda m, n, k: ((m, n), (m, k)),
}


@pytest.fixture(scope="module")
def native() -> Native:
    native_backends.emulator()
    found = native_of("musa_emulator")
    assert found is not None
    return found


class ScaledMM:
    """torch.nn.functional.scaled_mm as it is documented for Hopper, in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.dtype, bool]] = []
        kinds = types.SimpleNamespace(BlockWise1x128="1x128", BlockWise128x128="128x128")
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", self, raising=False)
        monkeypatch.setattr(torch.nn.functional, "ScalingType", kinds, raising=False)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, recipe_a: str, scale_b: torch.Tensor,
        recipe_b: str, *, bias: torch.Tensor | None, output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert (recipe_a, recipe_b) != ("128x128", "128x128")
        assert not a.dtype == b.dtype == torch.float8_e5m2
        assert bias is None or bias.dtype == output_dtype == BF16
        self.calls.append((output_dtype, bias is not None))
        product = self.values(a, scale_a, recipe_a) @ self.values(b.t(), scale_b, recipe_b).t()
        return (product if bias is None else product + bias.double()).to(output_dtype)

    @staticmethod
    def values(x: torch.Tensor, scale: torch.Tensor, recipe: str) -> torch.Tensor:
        rows, contraction = x.shape
        blocks = -(-contraction // 128)
        if recipe == "1x128":
            assert (tuple(scale.shape), scale.stride()) == ((rows, blocks), (1, rows))
            factors = scale
        else:
            padded = -(-blocks // 4) * 4
            assert (tuple(scale.shape), scale.stride()) == ((padded, -(-rows // 128)), (1, padded))
            factors = scale[:blocks].t().repeat_interleave(128, 0)[:rows]
        return x.double() * factors.repeat_interleave(128, 1)[:, :contraction].double()


def vendor(way: Way, product: Any = None) -> VendorGemm:
    return VendorGemm(choose=lambda *_: way, fp32_product=False, needs_rows=True, block_product=product)


def operands(
    modes: tuple[ScalingMode | None, ScalingMode | None], layout: str, sizes: tuple[int, int, int], **flags: Any
) -> tuple[list[Any], torch.Tensor]:
    """Two operands and their product in float64, from values by brute force."""
    given: list[Any] = []
    values = []
    for seed, (mode, shape, rowwise) in enumerate(zip(modes, SHAPES[layout](*sizes), ROWWISE[layout], strict=True)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        target: ElementFormat = E5M2 if seed else E4M3
        if mode is None:
            given.append(x)
            values.append(x.double())
        else:
            given.append(quantize(x, dtype=target.dtype, mode=mode, **{"columnwise": True, **flags}))
            values.append(torch.from_numpy(cast(x, mode, target, rowwise=rowwise).values))
    left, right = (
        (values[0].t() if layout == "wgrad" else values[0]),
        (values[1].t() if layout == "fprop" else values[1]),
    )
    return given, left @ right


PAIRINGS = [(ROW, ROW), (ROW, SQUARE), (SQUARE, ROW), (SQUARE, SQUARE), (MX, MX), (MX, None), (None, ROW)]


@pytest.mark.parametrize("modes", PAIRINGS, ids=lambda pair: "-".join(m.value if m else "bf16" for m in pair))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantized_operands_are_multiplied_within_the_bound(
    layout: str, modes: tuple[ScalingMode | None, ScalingMode | None], native: Native
) -> None:
    given, exact = operands(modes, layout, (40, 150, 70))
    for dtype in (BF16, FP32):
        result = vendor(Way.DEQUANTIZED, block_gemm.PRODUCT).gemm(native, *given, layout=layout, out_dtype=dtype)
        assert result.dtype == dtype
        assert relative_error(result, exact) <= BOUND[dtype]


@pytest.mark.parametrize("modes", [(ROW, ROW), (ROW, SQUARE), (SQUARE, ROW)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(64, 48, 80), (144, 272, 400), (128, 256, 512)], ids=str)
def test_torchs_product_by_blocks_reads_the_factors_where_they_lie(
    sizes: tuple[int, int, int],
    layout: str,
    modes: tuple[ScalingMode, ScalingMode],
    native: Native,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaled_mm = ScaledMM(monkeypatch)
    given, exact = operands(modes, layout, sizes)
    result = vendor(Way.BLOCKS, block_gemm.PRODUCT).gemm(native, *given, layout=layout, out_dtype=BF16)
    assert scaled_mm.calls == [(BF16, False)]
    assert relative_error(result, exact) <= BOUND[BF16]


def test_a_bias_of_its_dtype_goes_along_and_other_addends_follow_in_fp32(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_mm = ScaledMM(monkeypatch)
    (a, b), exact = operands((ROW, SQUARE), "fprop", (64, 48, 80))
    bias, out = torch.randn(48), torch.randn(64, 48).bfloat16()
    gemm = vendor(Way.BLOCKS, block_gemm.PRODUCT).gemm
    assert relative_error(gemm(native, a, b, bias=bias.bfloat16()), exact + bias.bfloat16().double()) <= BOUND[BF16]
    assert relative_error(gemm(native, a, b, bias=bias), exact + bias.double()) <= BOUND[BF16]
    expected = exact + out.double()
    assert gemm(native, a, b, out=out, accumulate=True) is out
    assert relative_error(out, expected) <= BOUND[BF16]
    assert scaled_mm.calls == [(BF16, True), (FP32, False), (FP32, False)]


@pytest.mark.parametrize("sizes", [(62, 48, 80), (64, 40, 80), (64, 48, 72), (0, 48, 80), (64, 48, 0)], ids=str)
def test_sizes_that_torch_does_not_take_are_dequantized(
    sizes: tuple[int, int, int], native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_mm = ScaledMM(monkeypatch)
    given, exact = operands((ROW, SQUARE), "fprop", sizes)
    result = vendor(Way.BLOCKS, block_gemm.PRODUCT).gemm(native, *given, out_dtype=BF16)
    assert scaled_mm.calls == []
    assert relative_error(result, exact) <= BOUND[BF16]


@pytest.mark.parametrize("order", ColumnwiseOrder)
@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
def test_square_blocks_serve_from_either_copy_and_vectors_from_the_one_along_the_sum(
    copy: str, order: ColumnwiseOrder, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_mm = ScaledMM(monkeypatch)
    gemm = vendor(Way.BLOCKS, block_gemm.PRODUCT).gemm
    for layout in ("fprop", "dgrad"):
        (a, b), exact = operands((ROW, SQUARE), layout, (64, 144, 272), columnwise_order=order)
        only = b.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise")
        assert relative_error(gemm(native, a, only, layout=layout), exact) <= BOUND[BF16]
    assert len(scaled_mm.calls) == 2
    wrong = a.keep(rowwise=False, columnwise=True)
    gemm(native, wrong, b, layout="dgrad")
    assert len(scaled_mm.calls) == 2


def kind(mode: ScalingMode, format: ElementFormat = E4M3) -> StorageKind:
    return StorageKind.of(format, mode, rowwise=True, columnwise=True, order=ColumnwiseOrder.TRANSPOSED)


TAKEN: dict[str, tuple[Any, Any, torch.dtype | None, bool]] = {
    "vectors": (kind(ROW), kind(ROW), BF16, True),
    "vectors and squares": (kind(ROW), kind(SQUARE, E5M2), BF16, True),
    "two squares": (kind(SQUARE), kind(SQUARE), BF16, False),
    "twice E5M2": (kind(ROW, E5M2), kind(ROW, E5M2), BF16, False),
    "into fp32": (kind(ROW), kind(ROW), FP32, False),
    "into an unknown dtype": (kind(ROW), kind(ROW), None, False),
    "MXFP8": (kind(MX), kind(MX), BF16, False),
    "a plain operand": (BF16, kind(ROW), BF16, False),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_torch_multiplies_by_blocks_is_decided_by_kinds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ScaledMM(monkeypatch)
    *asked, expected = TAKEN[case]
    for version, capability, built in (("12.9", (9, 0), True), ("12.8", (9, 0), False), ("13.0", (10, 0), False)):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert block_gemm.takes(torch.device("cuda"), *asked) is (expected and built)
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert not block_gemm.takes(torch.device("cuda"), *asked)


@pytest.fixture
def mate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stub of mate, on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "mate_stub"))
    groupwise._module.cache_clear()
    module = importlib.import_module("mate.gemm")
    module.calls.clear()
    yield module
    groupwise._module.cache_clear()


@pytest.mark.parametrize("layout", ["fprop", "dgrad"])
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 64), (torch.float16, 61)], ids=str)
def test_mates_product_takes_vectors_and_squares(
    dtype: torch.dtype, rows: int, layout: str, native: Native, mate: Any
) -> None:
    given, exact = operands((ROW, SQUARE), layout, (rows, 256, 384))
    given[1] = given[1].keep(rowwise=True, columnwise=False)
    out = torch.empty(exact.shape, dtype=dtype)
    assert vendor(Way.GROUPWISE, groupwise.PRODUCT).gemm(native, *given, layout=layout, out=out) is out
    assert len(mate.calls) == 1
    assert relative_error(out, exact) <= BOUND[dtype]


def test_what_mate_does_not_take_is_dequantized(native: Native, mate: Any) -> None:
    gemm = vendor(Way.GROUPWISE, groupwise.PRODUCT).gemm
    (a, b), exact = operands((ROW, SQUARE), "fprop", (64, 128, 192))
    assert relative_error(gemm(native, a, b, out_dtype=BF16), exact) <= BOUND[BF16]
    (a, b), exact = operands((ROW, SQUARE), "fprop", (64, 128, 256))
    bias = torch.randn(128).bfloat16()
    assert relative_error(gemm(native, a, b, bias=bias, out_dtype=BF16), exact + bias.double()) <= BOUND[BF16]
    assert mate.calls == []


@pytest.mark.usefixtures("mate")
@pytest.mark.parametrize(
    ("a", "b", "dtype", "expected"),
    [
        (kind(ROW), kind(SQUARE), BF16, True),
        (kind(ROW), kind(SQUARE), torch.float16, True),
        (kind(ROW), kind(SQUARE), FP32, False),
        (kind(ROW), kind(ROW), BF16, False),
        (kind(SQUARE), kind(ROW), BF16, False),
        (kind(MX), kind(MX), BF16, False),
    ],
    ids=str,
)
def test_what_mate_multiplies_is_decided_by_kinds(a: Any, b: Any, dtype: torch.dtype, expected: bool) -> None:
    assert groupwise.takes(a, b, dtype) is expected


def test_without_mate_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    groupwise._module.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not groupwise.takes(kind(ROW), kind(SQUARE), BF16)
    groupwise._module.cache_clear()
