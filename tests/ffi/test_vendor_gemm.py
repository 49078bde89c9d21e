"""Products by torch's own functions, each way of gemm_choice on CPU tensors, against float64.

torch._scaled_mm and torch.mm of the CPU stand in for the vendor's; the library is the emulator's, which decodes and
transposes. What differs on a GPU (fp32 products of 16-bit operands, which sizes are taken) is tested there.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import native_backends
import pytest
import torch
from closeness import relative_error
from quantized_operands import KINDS, columnwise_only, random_operand

from te_hal.ffi.marshalling import scaled_matmul
from te_hal.ffi.marshalling.gemm_choice import VendorGemm, Way
from te_hal.ffi.native import native_of
from te_hal.schema.formats import FLOATS, ColumnwiseOrder
from te_hal.schema.gemm import GEMM, LAYOUTS
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from te_hal.ffi.native import Native

BOUND = GEMM.contract.bound
M, N, K = 64, 48, 80
SHAPES = {"fprop": ((M, K), (N, K)), "dgrad": ((M, N), (N, K)), "wgrad": ((M, N), (M, K))}
FP8 = ("e4m3", "e5m2")


@pytest.fixture(scope="module")
def native() -> Native:
    native_backends.emulator()
    found = native_of("musa_emulator")
    assert found is not None
    return found


def vendor(way: Way, *, needs_rows: bool = True) -> VendorGemm:
    return VendorGemm(choose=lambda *_: way, fp32_product=False, needs_rows=needs_rows)


def oriented(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    return {"fprop": lambda: a @ b.t(), "dgrad": lambda: a @ b, "wgrad": lambda: a.t() @ b}[layout]()


def operands(kinds: tuple[str, str], layout: str, seed: int = 0) -> tuple[tuple[Any, Any], torch.Tensor]:
    """Two operands and their product in float64."""
    generator = torch.Generator().manual_seed(seed)
    (a, exact_a), (b, exact_b) = (
        random_operand(kind, shape, generator, 0.37) for kind, shape in zip(kinds, SHAPES[layout], strict=True)
    )
    return (a, b), oriented(exact_a, exact_b, layout)


@pytest.mark.parametrize("needs_rows", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", list(itertools.product(FP8, FP8)), ids="-".join)
@pytest.mark.parametrize("way", [Way.SCALED, Way.DECODED], ids=lambda way: way.name)
def test_quantized_operands(way: Way, kinds: tuple[str, str], layout: str, needs_rows: bool, native: Native) -> None:
    given, exact = operands(kinds, layout)
    for dtype in (torch.bfloat16, torch.float32):
        result = vendor(way, needs_rows=needs_rows).gemm(native, *given, layout=layout, out_dtype=dtype)
        assert result.dtype == dtype
        assert relative_error(result, exact) <= BOUND[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kinds", list(itertools.product(("fp32", "fp16", "bf16"), repeat=2)), ids="-".join)
def test_plain_operands(kinds: tuple[str, str], dtype: torch.dtype, layout: str, native: Native) -> None:
    given, exact = operands(kinds, layout)
    result = vendor(Way.PLAIN).gemm(native, *given, layout=layout, out_dtype=dtype)
    assert relative_error(result, exact) <= BOUND[dtype]


@pytest.mark.parametrize("order", ColumnwiseOrder)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whichever_copy_there_is_is_the_one_that_is_read(layout: str, order: ColumnwiseOrder, native: Native) -> None:
    (a, b), exact = operands(("e4m3", "e5m2"), layout)
    for given in itertools.product((a, columnwise_only(a, order)), (b, columnwise_only(b, order))):
        result = vendor(Way.SCALED).gemm(native, *given, layout=layout, out_dtype=torch.float32)
        assert relative_error(result, exact) <= BOUND[torch.float32]


def test_a_fitting_transposed_copy_is_used_and_nothing_is_transposed(
    monkeypatch: pytest.MonkeyPatch, native: Native
) -> None:
    (a, b), exact = operands(("e4m3", "e4m3"), "wgrad")
    both = [columnwise_only(x, ColumnwiseOrder.TRANSPOSED) for x in (a, b)]
    monkeypatch.setattr(scaled_matmul, "transposed", None)
    result = vendor(Way.SCALED).gemm(native, *both, layout="wgrad", out_dtype=torch.float32)
    assert relative_error(result, exact) <= BOUND[torch.float32]


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("way", [Way.SCALED, Way.DECODED, Way.PLAIN], ids=lambda way: way.name)
def test_bias_and_what_out_holds_are_added_before_the_one_rounding(
    way: Way, accumulate: bool, dtype: torch.dtype, bias_dtype: torch.dtype, native: Native
) -> None:
    given, exact = operands(("bf16", "bf16") if way is Way.PLAIN else ("e4m3", "e5m2"), "fprop")
    generator = torch.Generator().manual_seed(1)
    bias, out = torch.randn(N, generator=generator).to(bias_dtype), torch.randn(M, N, generator=generator).to(dtype)
    exact = exact + bias.double() + (out.double() if accumulate else 0.0)
    assert vendor(way).gemm(native, *given, bias=bias, out=out, accumulate=accumulate) is out
    assert relative_error(out, exact) <= BOUND[dtype]


@pytest.mark.parametrize("way", [Way.SCALED, Way.DECODED, Way.PLAIN], ids=lambda way: way.name)
def test_an_out_with_gaps_is_written_in_place(way: Way, native: Native) -> None:
    given, exact = operands(("bf16", "bf16") if way is Way.PLAIN else ("e4m3", "e5m2"), "fprop")
    buffer = torch.full((M, 2 * N), 7.0)
    vendor(way).gemm(native, *given, out=buffer[:, ::2])
    assert relative_error(buffer[:, ::2], exact) <= BOUND[torch.float32]
    assert buffer[:, 1::2].eq(7.0).all()


@pytest.mark.parametrize("shape", [(5, 7, 9), (64, 48, 24), (1, 16, 16), (0, 16, 16), (16, 16, 0)], ids=str)
def test_sizes_that_torch_does_not_take_are_decoded(shape: tuple[int, int, int], native: Native) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (random_operand("e4m3", size, generator) for size in ((m, k), (n, k)))
    result = vendor(Way.SCALED).gemm(native, a, b, out_dtype=torch.float32)
    assert result.shape == (m, n)
    assert relative_error(result, exact_a @ exact_b.t()) <= BOUND[torch.float32]


def test_an_address_that_torch_does_not_take_is_decoded(monkeypatch: pytest.MonkeyPatch, native: Native) -> None:
    (a, b), exact = operands(("e4m3", "e4m3"), "fprop")
    codes = torch.zeros(M * K + 1, dtype=torch.uint8)[1:].view(M, K).copy_(a.rowwise_data)
    monkeypatch.setattr(scaled_matmul, "multiply", None)
    moved = a.with_tensors((codes, a.rowwise_scale_inv, None, None))
    assert relative_error(vendor(Way.SCALED).gemm(native, moved, b, out_dtype=torch.float32), exact) <= 3e-6


def test_scales_whose_product_leaves_fp32_lose_no_representable_result(native: Native) -> None:
    generator = torch.Generator().manual_seed(0)
    (a, exact_a), (b, exact_b) = (
        random_operand("e4m3", s, generator, f) for s, f in (((8, 16), 1e-30), ((8, 16), 1e25))
    )
    result = vendor(Way.DECODED).gemm(native, a, b, out_dtype=torch.float32)
    assert relative_error(result, exact_a @ exact_b.t()) <= 3e-6


@pytest.mark.parametrize("way", [Way.DECODED, Way.PLAIN], ids=lambda way: way.name)
def test_torch_autocast_leaves_the_product_alone(way: Way, native: Native) -> None:
    given, exact = operands(("fp32", "fp32") if way is Way.PLAIN else ("e4m3", "e5m2"), "fprop")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = vendor(way).gemm(native, *given, out_dtype=torch.float32)
    assert relative_error(result, exact) <= BOUND[torch.float32]


def test_operands_that_require_a_gradient_give_a_product_that_does_not(native: Native) -> None:
    a, b = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    assert not vendor(Way.PLAIN).gemm(native, a, b, bias=torch.ones(16, requires_grad=True)).requires_grad


def test_the_result_dtype_is_outs_then_as(native: Native) -> None:
    a, b = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16)
    gemm = functools.partial(vendor(Way.PLAIN).gemm, native)
    assert gemm(a, b).dtype == torch.bfloat16
    assert gemm(a, b, out=torch.empty(16, 16, dtype=torch.float16)).dtype == torch.float16


def test_a_storages_kind_and_not_its_data_chooses_the_way(native: Native) -> None:
    (a, b), _ = operands(("e4m3", "bf16"), "fprop")
    seen: list[object] = []

    def choose(device: torch.device, a: object, b: object, dtype: object) -> Way:
        seen.append((device.type, a, b, dtype))
        return Way.PLAIN

    VendorGemm(choose=choose, fp32_product=False, needs_rows=True).gemm(native, b, b)
    assert isinstance(a, QuantizedStorage)
    assert seen == [("cpu", torch.bfloat16, torch.bfloat16, KINDS["bf16"])]


@pytest.mark.parametrize(
    ("way", "kinds", "dtype", "words"),
    [
        (Way.PLAIN, ("bf16", "bf16"), "bf16", "no operand is quantized"),
        (Way.SCALED, ("e4m3", "e4m3"), "bf16", "multiplies them as they are"),
        (Way.PORTABLE, ("e4m3", "bf16"), "bf16", "one operand is quantized"),
        (Way.DECODED, ("e4m3", "e4m3"), "fp32", "fp32 result"),
        (Way.DECODED, ("e5m2", "e5m2"), "bf16", "E5M2 by E5M2"),
        (Way.DECODED, ("e4m3", "e4m3"), "bf16", "on this device"),
    ],
)
def test_a_yes_says_the_way_and_the_reason(native: Native, way: Way, kinds, dtype: str, words: str) -> None:
    (a, b), _ = operands(kinds, "fprop")
    arguments = {"a": a, "b": b, "bias": None, "out": None}
    flags = {"layout": "fprop", "accumulate": False, "out_dtype": KINDS[dtype]}
    answer = vendor(way).supports(native, describe_call(GEMM, {**arguments, **flags}))
    assert answer
    assert answer.sentence.startswith(f"by {way.value}: ")
    assert words in answer.sentence
