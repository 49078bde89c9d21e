"""Float8Tensor: values, attributes, operations that give plain tensors, gradients, printing."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from float8_tensors import E4M3, E5M2, plain, quantized, quantizer
from fp8_codes import values_of

import te_hal
import te_hal.modules as te
from te_hal.schema import formats
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError
from te_hal.schema.storage import QuantizedStorage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_dequantizing_is_decode_times_scale_inv_rounded_once(dtype, fp8):
    q = quantizer(fp8)(torch.randn(8, 24).to(dtype))
    assert q.dequantize().dtype == dtype
    assert torch.equal(q.dequantize(), plain(q))
    exact = torch.from_numpy(values_of(q._data, formats.element_format(fp8))) * q._scale_inv
    for other in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(q.dequantize(dtype=other), exact.to(other))


def test_dequantizing_to_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match=r"dequantize: out_dtype: got torch\.float64"):
        quantized(4).dequantize(dtype=torch.float64)


def test_the_attributes_have_transformer_engines_names():
    q = quantized(4, 8)
    storage = q.quantized_storage
    assert q._data is q._rowwise_data is storage.rowwise_data
    assert q._transpose is q._columnwise_data is storage.columnwise_data
    assert q._scale_inv is storage.rowwise_scale_inv
    assert q._fp8_dtype is te.DType.kFloat8E4M3
    assert quantizer(E5M2)(torch.ones(2))._fp8_dtype is te.DType.kFloat8E5M2
    assert (q._data.dtype, q._scale_inv.dtype, q._scale_inv.shape) == (torch.uint8, torch.float32, (1,))


def test_shape_dtype_device_and_strides_are_those_of_what_it_stands_for():
    q = quantized(4, 8, dtype=torch.bfloat16)
    assert (q.shape, q.dtype, q.device, q.stride()) == ((4, 8), torch.bfloat16, torch.device("cpu"), (8, 1))
    assert (q.dim(), q.numel(), len(q), q.element_size()) == (2, 32, 4, 2)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("order", ["transposed", "same"])
def test_a_columnwise_only_tensor_has_its_logical_shape_and_no_rowwise_buffer(fp8, order):
    x = torch.randn(128, 256)
    made = quantizer(fp8, rowwise=False)
    made.columnwise_order = order
    q = made(x)
    assert (q.shape, q.size(), q.size(0), q.size(-1)) == ((128, 256), (128, 256), 128, 256)
    assert q._data is None
    assert q._rowwise_data is None
    assert q.quantized_storage.rowwise_scale_inv is None
    assert q._transpose.shape == ((256, 128) if order == "transposed" else (128, 256))
    assert torch.equal(q.dequantize(), quantizer(fp8)(x).dequantize())
    assert (q.dequantize() - x).norm() <= x.norm() * (2**-4 if fp8 is E4M3 else 2**-3)


READS = {
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ t.t(),
    "linear": lambda t: torch.nn.functional.linear(torch.ones(2, 8), t),
    "sum": lambda t: t.sum(),
    "transpose": lambda t: t.transpose(0, 1),
    "index": lambda t: t[1:, ::2],
    "cat": lambda t: torch.cat([t, t]),
    "compare": lambda t: t > 0,
    "double": lambda t: t.double(),
    "int": lambda t: t.int(),
    "fp8": lambda t: t.to(E5M2),
    "channels_last": lambda t: t.view(1, 2, 2, 8).contiguous(memory_format=torch.channels_last),
    "zeros_like": torch.zeros_like,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "view as bytes": lambda t: t.view(torch.int32),
    "addmm": lambda t: torch.addmm(torch.ones(4), t, t.t()),
    "foreach": lambda t: torch._foreach_add([t, t], 1.0)[1],
}


@pytest.mark.parametrize("name", READS)
def test_any_other_operation_gives_what_it_gives_for_the_plain_values(name):
    q = quantized(4, 8)
    result, expected = READS[name](q), READS[name](plain(q))
    assert type(result) is torch.Tensor
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_writing_to_the_plain_result_of_an_operation_changes_nothing():
    q = quantized(4, 8)
    before = plain(q)
    q.t().zero_()
    q[0].zero_()
    assert torch.equal(q.dequantize(), before)


# Autograd

GRADIENTS = {
    "dequantize": lambda q: q.dequantize(),
    "plain operation": lambda q: q * torch.arange(24.0).view(4, 6),
    "view": lambda q: q.view(2, 12).pow(2),
    "clone": lambda q: q.clone() * 3,
    "cast": lambda q: q.to(torch.bfloat16) * 3,
    "transpose": lambda q: q.t() * torch.arange(24.0).view(6, 4),
    "matmul": lambda q: q @ q.t(),
    "index": lambda q: q[1:3] * 2,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_plain_values(name):
    x = torch.randn(4, 6, requires_grad=True)
    q = quantizer()(x)
    reference = plain(q).requires_grad_()
    weights = torch.randn(GRADIENTS[name](reference.detach()).shape) if name != "dequantize" else torch.ones(4, 6)
    (GRADIENTS[name](q) * weights).sum().backward()
    made = reference if name != "dequantize" else reference.clone()
    result = made if name == "dequantize" else GRADIENTS[name](made)
    (result * weights).sum().backward()
    assert torch.allclose(x.grad, reference.grad, rtol=1e-2 if name == "cast" else 1e-6)


def test_gradients_pass_through_writes_in_place():
    for write in (lambda q: q.mul_(2), lambda q: q.view(-1).mul_(2), lambda q: q.view(2, 12).mul_(2)):
        x = torch.randn(4, 6, requires_grad=True)
        q = quantizer(columnwise=False)(x).clone()
        write(q)
        q.sum().backward()
        assert (x.grad == 2).all()


def test_gradients_pass_through_copies():
    x, target = torch.randn(4, 6, requires_grad=True), torch.zeros(4, 6)
    target.copy_(quantizer()(x))
    q = quantized(4, 6)
    q.copy_(x)
    (target.sum() + 3 * q.sum()).backward()
    assert (x.grad == 4).all()


def test_a_quantized_gradient_is_taken():
    x = torch.randn(4, 6, requires_grad=True)
    quantizer()(x).backward(quantizer(E5M2)(torch.full((4, 6), 2.0)))
    assert type(x.grad) is torch.Tensor
    assert (x.grad == 2).all()


def test_second_derivatives_and_recompute_work():
    x = torch.randn(4, 6, requires_grad=True)
    (first,) = torch.autograd.grad(quantizer()(x).pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (second == 2).all()
    torch.utils.checkpoint.checkpoint(lambda each: quantizer()(each) * 5, x, use_reentrant=False).sum().backward()
    assert (x.grad == 5).all()


def test_a_leaf_collects_a_plain_gradient():
    q = quantized(4, 6).requires_grad_()
    (q * 2).sum().backward()
    assert type(q.grad) is torch.Tensor
    assert (q.grad == 2).all()


def test_assignment_that_autograd_would_have_to_follow_is_refused():
    q = quantized(4, 6)
    with pytest.raises(StateError, match="requires a gradient"):
        q[0] = torch.ones(6, requires_grad=True)
    leaf = quantized(4, 6).requires_grad_()
    with pytest.raises(StateError, match="requires a gradient"):
        leaf[0] = 1.0
    with torch.no_grad():
        leaf[0] = 448.0
    assert (leaf.detach()[0] == 448.0).all()


# Printing and wrong use


@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
def test_printing_shows_values_format_copies_and_scale(usages):
    q = quantizer(**usages)(torch.tensor([[1.0, -448.0]]).bfloat16()).requires_grad_()
    text = repr(q)
    for part in (
        "Float8Tensor(tensor([[",
        "-448.",
        "E4M3/tensor/",
        "torch.bfloat16",
        "requires_grad=True",
        "scale_inv",
    ):
        assert part in text
    assert str(q) == text


def test_printing_works_where_no_backend_does():
    q = quantized(2, 3)
    text = repr(q)
    with te_hal.use_backend("null"):
        assert repr(q) == text
    assert "device=meta" in repr(q.to("meta"))


def test_an_op_that_is_given_one_says_what_to_pass():
    q = quantized(8, 16)
    for call in (lambda: te_hal.ops.gemm(q, q), lambda: te_hal.ops.dequantize(q), lambda: te_hal.ops.amax(q)):
        with pytest.raises(ArgumentTypeError, match=r"got a Float8Tensor.*quantized_storage"):
            call()


def test_the_storage_is_shared_with_whoever_made_it():
    storage = quantized(2, 2).quantized_storage
    assert isinstance(storage, QuantizedStorage)
    assert te.Float8Tensor(storage).quantized_storage is storage
