"""IdentityQuantizer and its tensors: the interface of quantized tensors over values that stay as they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from custom_recipes import BF16, E4M3

import te_hal.modules as te
from te_hal.quantization.identity_tensor import rebuild_identity_tensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (6, 8), generator=torch.Generator().manual_seed(3))


DTYPES = pytest.mark.parametrize("dtype", [None, BF16], ids=str)


@DTYPES
def test_its_values_are_those_of_the_tensor_or_these_rounded(dtype):
    x = data()
    q = te.IdentityQuantizer(dtype=dtype)(x)
    assert isinstance(q, te.IdentityTensor)
    assert isinstance(q, te.QuantizedTensor)
    assert (q.shape, q.dtype, q.get_usages()) == (x.shape, dtype or x.dtype, {"rowwise": True, "columnwise": True})
    assert torch.equal(q.dequantize(), x.to(dtype or x.dtype))
    assert torch.equal(q + 1, x.to(dtype or x.dtype) + 1)
    assert q.dequantize(dtype=torch.float64).dtype is torch.float64


def test_it_shares_nothing_with_the_tensor_or_with_what_dequantizing_gives():
    x = data()
    q, before = te.IdentityQuantizer()(x), x.clone()
    x.zero_()
    q.dequantize().zero_()
    assert torch.equal(q.dequantize(), before)


def test_a_nominal_dtype_of_the_callers_holds_the_rounded_values():
    q = te.IdentityQuantizer(dtype=BF16).quantize(data(), dtype=torch.float32)
    assert torch.equal(q.dequantize(), data().bfloat16().float())


@DTYPES
def test_the_gradient_passes_straight_through(dtype):
    x = data().requires_grad_()
    (te.IdentityQuantizer(dtype=dtype)(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def through_a_file(q: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([rebuild_identity_tensor]):
        return torch.load(buffer, weights_only=True)


REMAKES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": through_a_file,
    "cpu": lambda q: q.to("cpu", copy=True),
}


@pytest.mark.parametrize("remake", REMAKES)
def test_a_copy_has_the_same_values_and_shares_none(remake):
    q = te.IdentityQuantizer()(data())
    q.note = "kept"
    again = REMAKES[remake](q.detach() if remake in ("clone", "cpu") else q)
    assert isinstance(again, te.IdentityTensor)
    assert torch.equal(again.dequantize(), data())
    assert again._hp_data.data_ptr() != q._hp_data.data_ptr()
    assert getattr(again, "note", None) == ("kept" if remake in ("deepcopy", "pickle", "torch.save") else None)


@pytest.mark.parametrize("half", [lambda q: q.to(torch.float16)], ids=["to"])
def test_another_dtype_is_another_identity_tensor(half):
    q = half(te.IdentityQuantizer()(data()))
    assert (type(q), q.dtype, q._hp_data.dtype) == (te.IdentityTensor, torch.float16, torch.float16)


def test_views_and_parts_share_its_values():
    q = te.IdentityQuantizer()(data())
    view, (first, second) = q.view(3, 16), q.split(4)
    assert type(view) is type(first) is type(second) is te.IdentityTensor
    assert (first.shape, second.shape) == ((4, 8), (2, 8))
    second.zero_()
    view[0, 0] = 7.0
    expected = data()
    expected[4:], expected[0, 0] = 0.0, 7.0
    assert torch.equal(q.dequantize(), expected)
    assert type(q.split(4, dim=1)[0]) is torch.Tensor


def test_it_is_written_in_place():
    q, other = te.IdentityQuantizer(dtype=BF16)(data()), data() * 3 + 1
    q.quantize_(other)
    assert torch.equal(q.dequantize(), other.bfloat16())
    q.mul_(2)
    assert torch.equal(q.dequantize(), other.bfloat16() * 2)
    q.quantize_(data(), noop_flag=torch.ones(1))
    assert torch.equal(q.dequantize(), other.bfloat16() * 2)
    q.copy_(te.IdentityQuantizer()(data()))
    assert torch.equal(q.dequantize(), data().bfloat16())
    plain = torch.zeros(6, 8)
    plain.copy_(q)
    assert torch.equal(plain, data().bfloat16().float())


def test_an_empty_one_is_filled_in_place():
    quantizer = te.IdentityQuantizer()
    q = quantizer.make_empty((6, 8), dtype=BF16, requires_grad=True)
    assert (type(q), q.dtype, q.requires_grad) == (te.IdentityTensor, BF16, True)
    assert torch.equal(quantizer.update_quantized(data().bfloat16(), q.detach()).dequantize(), data().bfloat16())


def test_no_direction_is_made_or_dropped():
    q = te.IdentityQuantizer(rowwise=False, columnwise=False)(data())
    q.update_usage(rowwise_usage=False)
    q.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert torch.equal(q.dequantize(), data())
    with pytest.raises(ArgumentError, match="at least one of them"):
        q.update_usage(False, False)
    with pytest.raises(ArgumentError, match="rowwise_usage"):
        q.update_usage(rowwise_usage=1)


def test_a_module_takes_one_as_its_input_and_as_its_weight():
    module, x = te.Linear(8, 16, params_dtype=BF16), data().bfloat16()
    expected = module(x)
    assert torch.equal(module(te.IdentityQuantizer()(x)), expected)
    module.weight = torch.nn.Parameter(te.IdentityQuantizer()(module.weight.detach()))
    with pytest.warns(UserWarning, match="dequantized at each forward"):
        assert torch.equal(module(x), expected)


def test_the_report_of_memory_counts_it_once():
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(te.IdentityQuantizer()(data()).detach())
    report = te.memory_report(holder)
    assert (report.nbytes, [entry.name for entry in report.entries]) == (6 * 8 * 4, ["weight"])
    assert "in high precision" in report.entries[0].why


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    q, quantizer = te.IdentityQuantizer()(data()), te.IdentityQuantizer()
    float8 = te.Float8CurrentScalingQuantizer(E4M3)
    with pytest.raises(ArgumentError, match="IdentityQuantizer: dtype"):
        te.IdentityQuantizer(dtype=torch.int8)
    with pytest.raises(ArgumentError, match="IdentityQuantizer: out: got E4M3/tensor"):
        quantizer.quantize(data(), out=float8(data()))
    with pytest.raises(ArgumentError, match=r"of shape \(8, 6\)"):
        quantizer.quantize(data(8, 6), out=q)
    with pytest.raises(ArgumentTypeError, match="out: got a IdentityStorage"):
        float8.quantize(data(), out=q)
    with pytest.raises(ArgumentTypeError, match=r"plain torch\.Tensor"):
        quantizer(q)
    with pytest.raises(StateError, match="without codes"):
        quantizer.fused_arguments(rowwise=True, columnwise=True)
    with pytest.raises(StateError, match="without a quantizer"):
        pickle.loads(pickle.dumps(q)).mul_(2)
    assert torch.equal(q.dequantize(), data())
