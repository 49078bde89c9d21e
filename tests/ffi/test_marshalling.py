"""What reaches a library: addresses from data_ptr(), sizes and codes by the header's names, dense memory only.

The library is a stub that notes its arguments, so each claim is about the call itself and not about a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import native_stub
import pytest
import torch
from quantized_operands import columnwise_only, storage

from te_hal.ffi.binding import binding
from te_hal.ffi.devices import HOST
from te_hal.ffi.loader import open_library
from te_hal.ffi.marshalling import kernels
from te_hal.ffi.native import Native
from te_hal.schema.errors import ArgumentError, KernelError, TeHalError, UnsupportedError
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BF16, FP32, E4M3_DTYPE = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NORMS = {"layernorm": 1, "rmsnorm": 2}


class Stubbed:
    """Kernels over a stub library, and what the last call of an entry was given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        native = Native("stub", "host", HOST)
        native.library = open_library(path)
        native.lib, native.ffi = binding()
        self.kernels = kernels(native)
        native_stub.calls(path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.kernels[name]

    def given(self, entry: str) -> dict[str, float]:
        matching = [arguments for name, arguments in native_stub.calls(self.path) if name == entry]
        assert len(matching) == 1, matching
        return matching[0]


@pytest.fixture
def stubbed(stub: Callable[..., Path]) -> Stubbed:
    return Stubbed(stub())


def holds(given: dict[str, float], **expected: float) -> None:
    assert {name: given[name] for name in expected} == expected


def test_quantize_passes_sizes_codes_and_the_address_of_every_buffer(stubbed: Stubbed) -> None:
    x, scale, amax = torch.randn(3, 4, 5).to(BF16), torch.tensor(2.0), torch.zeros(1)
    made = stubbed.quantize(x, scale, amax=amax, dtype=torch.float8_e5m2, columnwise=True)
    assert made.columnwise_data.shape == (5, 3, 4)
    assert made.rowwise_scale_inv is made.columnwise_scale_inv
    holds(
        stubbed.given("quantize"),
        input=x.data_ptr(),
        input_dtype=3,
        rows=12,
        cols=5,
        output_dtype=5,
        stream=0,
        scale=scale.data_ptr(),
        amax=amax.data_ptr(),
        columnwise_order=0,
        rowwise_data=made.rowwise_data.data_ptr(),
        columnwise_data=made.columnwise_data.data_ptr(),
        rowwise_scale_inv=made.rowwise_scale_inv.data_ptr(),
        columnwise_scale_inv=made.rowwise_scale_inv.data_ptr(),
    )


def test_what_is_left_out_has_the_address_0(stubbed: Stubbed) -> None:
    stubbed.quantize(torch.ones(2, 2), torch.ones(1), dtype=E4M3_DTYPE)
    holds(stubbed.given("quantize"), amax=0, columnwise_data=0, columnwise_scale_inv=0)


def test_a_tensor_without_elements_is_not_taken_for_one_that_is_left_out(stubbed: Stubbed) -> None:
    stubbed.quantize(torch.ones(0, 16), torch.ones(1), dtype=E4M3_DTYPE)
    given = stubbed.given("quantize")
    holds(given, rows=0, cols=16)
    assert given["input"] > 0
    assert given["rowwise_data"] > 0


@pytest.mark.parametrize(
    ("shape", "rows", "cols"), [((), 1, 1), ((7,), 1, 7), ((2, 7), 2, 7), ((2, 3, 7), 6, 7), ((3, 0), 3, 0)], ids=str
)
def test_leading_dimensions_are_rows(shape: tuple[int, ...], rows: int, cols: int, stubbed: Stubbed) -> None:
    made = stubbed.quantize(torch.ones(shape), torch.ones(1), dtype=E4M3_DTYPE, columnwise=True)
    assert made.columnwise_data.shape == (*shape[-1:], *shape[:-1])
    holds(stubbed.given("quantize"), rows=rows, cols=cols)


def test_an_input_with_gaps_is_copied_and_not_misread(stubbed: Stubbed) -> None:
    x = torch.randn(6, 8).t()
    stubbed.amax(x)
    given = stubbed.given("amax")
    assert given["input"] != x.data_ptr()
    holds(given, count=48)


def test_an_input_that_requires_a_gradient_is_read_and_gets_none(stubbed: Stubbed) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    result = stubbed.dequantize(stubbed.quantize(x, torch.ones(1), dtype=E4M3_DTYPE))
    assert not result.requires_grad
    assert not stubbed.amax(x.t()).requires_grad


def test_nothing_that_requires_a_gradient_is_written(stubbed: Stubbed) -> None:
    amax = torch.zeros(1, requires_grad=True)
    with pytest.raises(ArgumentError, match="amax: got a tensor that requires a gradient"):
        stubbed.quantize(torch.ones(2, 2), torch.ones(1), amax=amax, dtype=E4M3_DTYPE)
    with pytest.raises(ArgumentError, match="out: got a tensor that requires a gradient"):
        stubbed.gemm(torch.ones(2, 2), torch.ones(2, 2), out=torch.ones(2, 2, requires_grad=True))
    assert native_stub.calls(stubbed.path) == []


def test_an_output_with_gaps_gets_what_its_stand_in_received(stubbed: Stubbed) -> None:
    out = torch.zeros(4, 8)[:, ::2]
    assert stubbed.gemm(torch.ones(4, 2), torch.ones(4, 2), out=out, accumulate=True) is out
    given = stubbed.given("gemm")
    assert given["out"] != out.data_ptr()
    holds(given, flags=1, out_dtype=1)


def test_a_storage_with_gaps_is_refilled_through_a_stand_in(stubbed: Stubbed) -> None:
    out = storage(torch.zeros(4, 8, dtype=torch.uint8), E4M3)
    out.rowwise_data = torch.zeros(8, 4, dtype=torch.uint8).t()
    assert stubbed.quantize(torch.ones(4, 8), torch.ones(1), dtype=E4M3_DTYPE, out=out) is out
    assert stubbed.given("quantize")["rowwise_data"] != out.rowwise_data.data_ptr()


def test_dequantize_reads_the_rowwise_copy_or_else_says_how_the_other_one_lies(stubbed: Stubbed) -> None:
    rowwise = storage(torch.zeros(4, 6, dtype=torch.uint8), E5M2)
    stubbed.dequantize(rowwise, out_dtype=FP32)
    holds(stubbed.given("dequantize"), copy=0, data=rowwise.rowwise_data.data_ptr(), data_dtype=5, output_dtype=1)
    for order, copy in ((ColumnwiseOrder.TRANSPOSED, 1), (ColumnwiseOrder.SAME, 2)):
        stubbed.dequantize(columnwise_only(rowwise, order))
        holds(stubbed.given("dequantize"), copy=copy, rows=4, cols=6, mode=1, output_dtype=3)


def test_amax_adds_to_out_and_starts_anew_without_it(stubbed: Stubbed) -> None:
    out = torch.ones(1)
    assert stubbed.amax(torch.ones(5), out=out) is out
    holds(stubbed.given("amax"), amax=out.data_ptr(), flags=1, count=5, workspace_size=64)
    stubbed.amax(torch.ones(5))
    holds(stubbed.given("amax"), flags=0)


def test_compute_scale_passes_its_numbers(stubbed: Stubbed) -> None:
    stubbed.compute_scale(torch.ones(2, 3), fp8_max=448.0, epsilon=0.5, power_of_2=True, value_for_inf=9.0)
    holds(stubbed.given("compute_scale"), count=6, fp8_max=448.0, epsilon=0.5, value_for_inf=9.0, flags=2, scale_inv=0)


def test_update_delayed_scale_takes_row_0_as_it_lies_and_other_rows_as_a_copy(stubbed: Stubbed) -> None:
    history, scale = torch.zeros(4, 3), torch.ones(3)
    stubbed.update_delayed_scale(history, scale, reduced_amax=history[0], fp8_max=448.0, margin=2)
    given = stubbed.given("update_delayed_scale")
    holds(given, reduced_amax=history.data_ptr(), length=4, count=3, margin=2, algo=0)
    stubbed.update_delayed_scale(
        history, scale, reduced_amax=history[2], fp8_max=448.0, amax_compute_algo="most_recent"
    )
    given = stubbed.given("update_delayed_scale")
    assert given["reduced_amax"] not in (history[2].data_ptr(), 0)
    holds(given, algo=1)


SHAPES_OF_LAYOUTS = {
    "fprop": ((2, 5), (3, 5), (2, 3)),
    "dgrad": ((2, 3), (3, 5), (2, 5)),
    "wgrad": ((2, 3), (2, 5), (3, 5)),
}


@pytest.mark.parametrize("layout", SHAPES_OF_LAYOUTS)
def test_gemm_names_m_n_and_k_alike_in_every_layout(layout: str, stubbed: Stubbed) -> None:
    a, b, result = SHAPES_OF_LAYOUTS[layout]
    assert stubbed.gemm(torch.ones(a), torch.ones(b), layout=layout).shape == result
    number = ("fprop", "dgrad", "wgrad").index(layout)
    holds(stubbed.given("gemm"), layout=number, m=2, n=3, k=5, a_copy=0, a_mode=0, a_scale_inv=0, bias=0, bias_dtype=0)


def test_gemm_describes_a_quantized_operand_and_a_plain_one(stubbed: Stubbed) -> None:
    a = columnwise_only(storage(torch.zeros(4, 8, dtype=torch.uint8), E5M2), ColumnwiseOrder.TRANSPOSED)
    b, bias = torch.ones(16, 8, dtype=torch.float16), torch.ones(16)
    stubbed.gemm(a, b, bias=bias)
    holds(
        stubbed.given("gemm"),
        a=a.columnwise_data.data_ptr(),
        a_dtype=5,
        a_copy=1,
        a_mode=1,
        a_scale_inv=a.columnwise_scale_inv.data_ptr(),
        b=b.data_ptr(),
        b_dtype=2,
        b_copy=0,
        b_mode=0,
        b_scale_inv=0,
        bias=bias.data_ptr(),
        bias_dtype=1,
        out_dtype=3,
    )


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_passes_its_kind_and_what_the_other_kind_lacks_as_0(norm: str, stubbed: Stubbed) -> None:
    x, weight, bias = torch.randn(2, 3, 8).to(BF16), torch.ones(8), torch.zeros(8, dtype=BF16)
    operands = (x, weight, bias) if norm == "layernorm" else (x, weight)
    results = stubbed.kernels[f"{norm}_fwd"](*operands, epsilon=0.25, zero_centered_gamma=True, out_dtype=FP32)
    output, *statistics = results
    assert [s.shape for s in statistics] == [(2, 3)] * (2 if norm == "layernorm" else 1)
    given = stubbed.given("norm_fwd")
    holds(given, norm=NORMS[norm], rows=6, cols=8, weight_dtype=1, epsilon=0.25, flags=4, output_dtype=1)
    holds(given, output=output.data_ptr(), rstd=statistics[-1].data_ptr())
    expected = (bias.data_ptr(), 3, statistics[0].data_ptr()) if norm == "layernorm" else (0, 0, 0)
    assert (given["bias"], given["bias_dtype"], given["mean"]) == expected


@pytest.mark.parametrize("norm", NORMS)
def test_the_backward_of_a_norm_gives_gradients_in_the_schemas_dtypes(norm: str, stubbed: Stubbed) -> None:
    x, grad, weight = torch.randn(6, 8).to(BF16), torch.randn(6, 8), torch.ones(8, dtype=torch.float16)
    statistics = [torch.zeros(6)] * (2 if norm == "layernorm" else 1)
    grads = stubbed.kernels[f"{norm}_bwd"](grad, x, *statistics, weight)
    assert [g.dtype for g in grads] == [BF16, torch.float16, torch.float16][: len(grads)]
    given = stubbed.given("norm_bwd")
    holds(given, norm=NORMS[norm], grad_dtype=1, input_dtype=3, rows=6, cols=8, weight_dtype=2, workspace_size=64)
    holds(given, grad_input=grads[0].data_ptr(), grad_weight=grads[1].data_ptr())
    assert given["grad_bias"] == (grads[2].data_ptr() if norm == "layernorm" else 0)


MASKS = {
    (4, 3, 5, 7): (105, 35, 7, 1),
    (4, 1, 5, 7): (35, 0, 7, 1),
    (5, 7): (0, 0, 7, 1),
    (1, 1, 1, 7): (0, 0, 0, 1),
}


@pytest.mark.parametrize("mask_shape", MASKS, ids=str)
def test_a_mask_is_read_through_its_strides(mask_shape: tuple[int, ...], stubbed: Stubbed) -> None:
    strides = MASKS[mask_shape]
    mask = torch.zeros(mask_shape, dtype=torch.bool)
    stubbed.softmax_fwd(torch.randn(4, 3, 5, 7), mask=mask, scale=0.5, causal="bottom_right", window=(2, 0))
    given = stubbed.given("softmax_fwd")
    holds(given, outer=4, inner=3, queries=5, keys=7, scale=0.5, mask=mask.data_ptr(), causal=2)
    holds(given, window_left=2, window_right=0)
    names = ("outer", "inner", "query", "key")
    seen = tuple(given[f"mask_{name}_stride"] for name in names)
    sizes = (4, 3, 5, 7)
    assert all(a == b or size == 1 for a, b, size in zip(seen, strides, sizes, strict=True)), seen


def test_a_mask_whose_many_leading_dimensions_no_strides_express_is_written_out(stubbed: Stubbed) -> None:
    mask = torch.zeros(2, 1, 3, 5, 7, dtype=torch.bool)
    stubbed.softmax_fwd(torch.randn(2, 4, 3, 5, 7), mask=mask)
    given = stubbed.given("softmax_fwd")
    holds(given, outer=8, inner=3, queries=5, keys=7)
    assert given["mask"] != mask.data_ptr()


def test_softmax_bwd_says_what_the_forward_hid(stubbed: Stubbed) -> None:
    grad, output = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(BF16)
    assert stubbed.softmax_bwd(grad, output, scale=0.5).dtype == FP32
    holds(stubbed.given("softmax_bwd"), batches=6, queries=4, keys=5, causal=0, window_left=-1, window_right=-1)
    stubbed.softmax_bwd(grad, output, causal="bottom_right", window=(2, 1))
    holds(stubbed.given("softmax_bwd"), causal=2, window_left=2, window_right=1)


def test_a_gated_activation_halves_and_its_gradient_does_not(stubbed: Stubbed) -> None:
    x = torch.randn(2, 3, 8).to(BF16)
    made = stubbed.activation_fwd(x, activation="swiglu", out_dtype=FP32)
    assert (made.shape, made.dtype) == ((2, 3, 4), FP32)
    holds(stubbed.given("activation_fwd"), activation=11, rows=6, cols=4, limit=0, alpha=0, offset=0, output_dtype=1)
    assert stubbed.activation_bwd(made, x, activation="swiglu").shape == x.shape
    holds(stubbed.given("activation_bwd"), rows=6, cols=4, grad_dtype=1, input_dtype=3, grad_input_dtype=3)


def test_clamped_swiglu_has_its_parameters_filled_in(stubbed: Stubbed) -> None:
    stubbed.activation_fwd(torch.randn(2, 8), activation="clamped_swiglu", alpha=2.0)
    holds(stubbed.given("activation_fwd"), activation=12, limit=7.0, alpha=2.0, offset=1.0)


def test_bias_grad_sums_over_rows(stubbed: Stubbed) -> None:
    assert stubbed.bias_grad(torch.ones(3, 5, dtype=BF16), out_dtype=FP32).shape == (5,)
    holds(stubbed.given("bias_grad"), rows=3, cols=5, grad_dtype=3, grad_bias_dtype=1)


STATUSES = {
    1: (ArgumentError, "the stub says no"),
    2: (ArgumentError, "multiples of the element"),
    6: (UnsupportedError, "the stub says no"),
    9: (KernelError, "free memory"),
    10: (KernelError, "the stub says no"),
    12: (KernelError, "report it"),
    13: (KernelError, "status 13, which te_hal does not know"),
    -7: (KernelError, "status -7, which te_hal does not know"),
    99999: (KernelError, "status 99999, which te_hal does not know"),
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_becomes_the_error_that_fits_with_its_sentence(status: int, stub: Callable[..., Path]) -> None:
    stubbed = Stubbed(stub(STATUS=status))
    error, words = STATUSES[status]
    with pytest.raises(TeHalError) as caught:
        stubbed.amax(torch.ones(3))
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert str(caught.value).startswith("amax on backend stub: got ")
