"""What a library is asked about a call, and what becomes of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import native_stub
import pytest
import torch
from example_calls import ALL_CALLS, arguments, call_id

from te_hal.ffi import capability
from te_hal.ffi.binding import binding
from te_hal.ffi.capability import _DESCRIPTIONS, ask
from te_hal.ffi.devices import HOST
from te_hal.ffi.loader import open_library
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import Call, Code
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from te_hal.schema.op import OpSchema

BF16, CPU = torch.bfloat16, torch.device("cpu")


def over(path: Path) -> Native:
    native = Native("stub", "host", HOST)
    native.library = open_library(path)
    native.lib, native.ffi = binding()
    return native


def kind(fmt: object, *, columnwise_only: bool = False, mode: ScalingMode = ScalingMode.TENSOR) -> StorageKind:
    order = ColumnwiseOrder.TRANSPOSED
    return StorageKind.of(fmt, mode, rowwise=not columnwise_only, columnwise=columnwise_only, order=order)


def gemm(a: object, b: object, out_dtype: torch.dtype | None = None) -> Call:
    flags = {"layout": "wgrad", "accumulate": True, "out_dtype": out_dtype}
    return Call("gemm", CPU, {"a": a, "b": b, "bias": None, "out": None}, flags)


@pytest.mark.parametrize(("schema", "variant"), ALL_CALLS, ids=call_id)
def test_a_right_call_of_every_op_can_be_described(
    schema: OpSchema, variant: object, stub: Callable[..., Path]
) -> None:
    assert ask(over(stub()), describe_call(schema, arguments(schema, variant)))


def test_every_kernel_has_a_description(stub: Callable[..., Path]) -> None:
    assert _DESCRIPTIONS.keys() == kernels(over(stub())).keys()


def test_the_librarys_no_is_the_answer_with_its_sentence(stub: Callable[..., Path]) -> None:
    answer = ask(over(stub(STATUS="TE_HAL_UNSUPPORTED", SENTENCE='"supports: not on Tuesdays"')), gemm(BF16, BF16))
    assert (answer.code, answer.sentence) == (Code.NO_KERNEL, "supports: not on Tuesdays")


@pytest.mark.parametrize("status", [1, 12, 99])
def test_any_other_status_is_a_no_as_well(status: int, stub: Callable[..., Path]) -> None:
    assert ask(over(stub(STATUS=status)), gemm(BF16, BF16)).code is Code.NO_KERNEL


def test_a_scaling_mode_without_marshalling_is_refused_without_asking(
    stub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capability, "MARSHALLED", frozenset({ScalingMode.TENSOR}))
    native = over(stub())
    answer = ask(native, gemm(kind(E4M3, mode=ScalingMode.MXFP8), BF16))
    assert answer.code is Code.MODE
    assert "mxfp8" in answer.sentence
    assert native_stub.calls(native.library.path) == []


def test_two_families_of_scales_are_refused_without_asking(stub: Callable[..., Path]) -> None:
    native = over(stub())
    answer = ask(native, gemm(kind(E4M3, mode=ScalingMode.MXFP8), kind(E4M3, mode=ScalingMode.BLOCK_1X128)))
    assert answer.code is Code.MODE
    assert "'block_1x128' and 'mxfp8'" in answer.sentence
    assert native_stub.calls(native.library.path) == []


def test_the_description_names_the_copy_with_its_blocks_along_the_sum() -> None:
    both = StorageKind.of(E4M3, ScalingMode.MXFP8, rowwise=True, columnwise=True, order=ColumnwiseOrder.SAME)
    description = _DESCRIPTIONS["gemm"](gemm(both, kind(E4M3, mode=ScalingMode.MXFP8)))
    assert (description["input_mode"], description["other_mode"]) == (5, 5)
    assert (description["input_copy"], description["other_copy"]) == (2, 0)


def test_a_missing_library_is_a_no_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    native_stub.need()
    monkeypatch.setattr("te_hal.ffi.locations.candidates", lambda _: [])
    answer = ask(Native("stub", "musa", HOST), gemm(BF16, BF16))
    assert answer.code is Code.LOAD_FAILED
    assert "libte_hal_musa.so" in answer.sentence


def test_the_result_of_a_quantized_operand_may_have_any_dtype_so_all_are_asked(stub: Callable[..., Path]) -> None:
    native = over(stub())
    for call, count in (
        (gemm(kind(E4M3), kind(E5M2)), 3),
        (gemm(kind(E4M3), kind(E5M2), BF16), 1),
        (gemm(BF16, BF16), 1),
    ):
        ask(native, call)
        assert len(native_stub.calls(native.library.path)) == count


def test_the_description_of_a_product_has_every_part(stub: Callable[..., Path]) -> None:
    native = over(stub())
    description = _DESCRIPTIONS["gemm"](gemm(kind(E4M3, columnwise_only=True), torch.float16, BF16))
    expected = {"op": 7, "kind": 2, "flags": 1, "input_dtype": 4, "input_mode": 1, "input_copy": 1}
    assert description == expected | {"other_dtype": 2, "bias_dtype": 0}
    question = native.ffi.new("te_hal_call *", description)
    assert (question.rows, question.cols, question.depth) == (0, 0, 0)
