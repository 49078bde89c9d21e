"""Float8Tensor under torch's operations: what keeps it quantized, what writes to it, copy_."""

from __future__ import annotations

import pytest
import torch
from float8_tensors import E4M3, E5M2, assert_copies_agree, is_quantized, plain, quantized, quantizer

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError, StateError

KEPT = {
    "detach": lambda q: q.detach(),
    "clone": lambda q: q.clone(),
    "alias": lambda q: q.view_as(q),
    "data": lambda q: q.data,
    "same view": lambda q: q.view(4, 6, 8),
    "merged rows": lambda q: q.view(24, 8),
    "reshape": lambda q: q.reshape(2, 12, 8),
    "flatten": lambda q: q.view(-1),
    "other last": lambda q: q.view(4, 48),
    "to bf16": lambda q: q.to(torch.bfloat16),
    "to fp16": lambda q: q.to(torch.float16),
    "there and back": lambda q: q.to(torch.bfloat16).to(torch.float32),
    "cpu": lambda q: q.cpu(),
    "copy to cpu": lambda q: q.to("cpu", copy=True),
    "contiguous": lambda q: q.contiguous(),
}


@pytest.mark.parametrize("order", ["transposed", "same"])
@pytest.mark.parametrize("name", KEPT)
def test_the_format_keeps_it_quantized(name, order):
    made = quantizer()
    made.columnwise_order = order
    q = made(torch.randn(4, 6, 8))
    result = KEPT[name](q)
    expected = KEPT[name](plain(q))
    assert is_quantized(result)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.dequantize(), (plain(q.detach()).to(expected.dtype)).reshape(expected.shape))
    if order == "transposed":
        assert_copies_agree(result)


@pytest.mark.parametrize("name", ["detach", "alias", "data", "same view", "flatten"])
def test_views_share_the_bytes(name):
    q = quantized(4, 6, 8)
    assert KEPT[name](q)._data.data_ptr() == q._data.data_ptr()


@pytest.mark.parametrize("name", ["clone", "to bf16", "copy to cpu"])
def test_copies_share_nothing(name):
    q = quantized(4, 6, 8)
    before = [buffer.clone() for buffer in q.quantized_storage.tensors()]
    result = KEPT[name](q)
    for buffer in result.quantized_storage.tensors():
        buffer.zero_()
    assert all(torch.equal(old, new) for old, new in zip(before, q.quantized_storage.tensors(), strict=True))


def test_a_view_that_the_values_do_not_allow_is_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        quantized(4, 6).view(5, 5)


def test_a_columnwise_only_tensor_views_as_a_plain_one():
    q = quantized(4, 6, rowwise=False)
    assert torch.equal(q.view(24), plain(q).reshape(24))


def test_moving_to_another_device_keeps_it_quantized():
    moved = quantized(4, 8).to("meta")
    assert is_quantized(moved)
    assert {buffer.device.type for buffer in moved.quantized_storage.tensors()} == {"meta"}


# Writing

WRITES = {
    "add_": lambda t: t.add_(1.5),
    "iadd": lambda t: t.__iadd__(torch.ones(8)),
    "mul_": lambda t: t.mul_(-3),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(7.0),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "add_ itself": lambda t: t.add_(t),
    "out=": lambda t: torch.mul(t, 2, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 0.5),
    "foreach twice": lambda t: torch._foreach_add_([t, t], 1.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 2.0),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([1]), 9.0),
    "normal init": lambda t: torch.nn.init.constant_(t, 0.3),
    "index": lambda t: t.__setitem__(1, 5.0),
    "slice": lambda t: t.__setitem__((slice(1, 3), slice(None, None, 2)), torch.full((2, 4), 6.0)),
    "mask": lambda t: t.__setitem__(t > 0.5, torch.tensor(-1.0)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=["both", "row", "column"])
def test_writing_in_place_dequantizes_computes_and_quantizes_back(name, usages):
    q = quantized(4, 8, **usages)
    values = plain(q)
    result = WRITES[name](q)
    WRITES[name](values)
    assert torch.equal(q.dequantize(), quantizer()(values).dequantize())
    assert_copies_agree(q)
    assert result is None or result is q or all(each is q for each in result)


def test_a_write_into_a_plain_tensor_reads_the_quantized_one():
    q, target = quantized(4, 8), torch.ones(4, 8)
    result = target.add_(q)
    assert result is target
    assert torch.equal(target, 1 + plain(q))


def test_writing_uses_the_quantizer_that_made_it():
    made = te.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), E4M3)
    q = made(torch.tensor([1.0, 2.0]))
    q.mul_(5)
    assert (q._scale_inv.item(), made.amax.item()) == (0.5, 10.0)
    assert q.dequantize().tolist() == [5.0, 10.0]


def test_writing_to_a_view_writes_to_the_whole():
    q = quantized(4, 6, 8)
    q.view(24, 8).mul_(2)
    q.detach().add_(1)
    q.data.add_(1)
    assert_copies_agree(q)
    only_rows = quantized(4, 6, columnwise=False)
    only_rows.view(-1).fill_(3.0)
    assert (only_rows.dequantize() == 3.0).all()


REFUSED_WRITES = {
    "a view without the columnwise copy": lambda: quantized(4, 6).view(24),
    "no quantizer": lambda: te.Float8Tensor(quantized(4, 6).quantized_storage),
}


@pytest.mark.parametrize("case", REFUSED_WRITES)
@pytest.mark.parametrize("name", ["add_", "zero_", "index", "foreach"])
def test_a_write_that_would_leave_copies_at_odds_is_refused(case, name):
    q = REFUSED_WRITES[case]()
    before = plain(q)
    with pytest.raises(StateError, match="in-place operation"):
        WRITES[name](q)
    with pytest.raises(StateError, match="in-place operation"):
        q.quantize_(torch.zeros(q.shape))
    assert torch.equal(plain(q), before)


def test_a_resize_is_refused():
    with pytest.raises(ArgumentError, match="shape"):
        quantized(4, 8).resize_(2, 8)


def test_assigning_data_takes_effect():
    q = quantized(4, 8)
    q.data = torch.ones(4, 8)
    assert (q.dequantize() == 1).all()
    other = quantizer(E5M2)(torch.full((2, 3), 2.0, dtype=torch.bfloat16))
    q.data = other
    assert (q.shape, q.dtype, q._fp8_dtype) == ((2, 3), torch.bfloat16, te.DType.kFloat8E5M2)
    assert (q.dequantize() == 2).all()


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_moves_a_quantized_parameter(optimizer, foreach):
    parameter = torch.nn.Parameter(quantizer()(torch.full((4, 8), 2.0)))
    assert isinstance(parameter, torch.nn.Parameter)
    parameter.grad = torch.ones(4, 8)
    optimizer([parameter], lr=0.5, foreach=foreach).step()
    assert is_quantized(parameter.detach())
    assert parameter.detach().dequantize().sub(1.5).abs().max() < 0.1
    assert_copies_agree(parameter)


def test_a_module_casts_a_quantized_parameter():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(quantized(4, 8))
    module.bfloat16()
    assert (module.weight.dtype, module.weight.dequantize().dtype) == (torch.bfloat16, torch.bfloat16)
    assert module.weight.quantized_storage.dtype == torch.bfloat16


# copy_


def test_copying_from_a_plain_tensor_quantizes():
    for dtype in (torch.float32, torch.bfloat16):
        q, x = quantized(4, 8), torch.randn(4, 8, dtype=dtype)
        assert q.copy_(x) is q
        assert torch.equal(q._data, quantizer()(x)._data)
        assert q.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool], ids=str)
def test_copying_converts_other_dtypes_as_torch_does(dtype):
    q, x = quantized(4, 8), torch.arange(32).reshape(4, 8).to(dtype)
    q.copy_(x)
    assert torch.equal(q._data, quantizer()(x.float())._data)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (4, 1), (), (1, 1)], ids=str)
def test_copying_broadcasts(shape):
    x = torch.randn(shape)
    expected = quantizer()(x.expand(4, 8))
    for source in (x, quantizer()(x)):
        q = quantized(4, 8)
        q.copy_(source)
        assert torch.equal(q._data, expected._data)
        assert_copies_agree(q)


def test_copying_a_square_broadcast_keeps_rows_and_columns_apart():
    q, row = quantized(4, 4), quantizer()(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    q.copy_(row)
    assert torch.equal(q.dequantize(), row.dequantize().expand(4, 4))
    assert_copies_agree(q)


def test_copying_one_of_the_same_kind_and_shape_copies_bytes_and_scale():
    """Without quantizing again: the destination's own scale would have given other bytes."""
    source = te.Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), E4M3)(torch.randn(4, 8))
    target = te.Float8Tensor(quantized(4, 8).quantized_storage)
    target.copy_(source)
    for old, new in zip(source.quantized_storage.tensors(), target.quantized_storage.tensors(), strict=True):
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


@pytest.mark.parametrize("usages", [{"columnwise": False}, {"rowwise": False}], ids=["row", "column"])
def test_copying_another_kind_quantizes_its_values(usages):
    source, target = quantizer(E5M2, **usages)(torch.randn(4, 8)), quantized(4, 8)
    target.copy_(source)
    assert target._fp8_dtype is te.DType.kFloat8E4M3
    assert torch.equal(target.dequantize(), quantizer()(source.dequantize()).dequantize())
    assert_copies_agree(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_copying_into_a_plain_tensor_dequantizes(dtype):
    q, target = quantized(4, 8), torch.zeros(2, 4, 8, dtype=dtype)
    target.copy_(q)
    assert torch.equal(target, plain(q).to(dtype).expand(2, 4, 8))


# Special values and shapes


@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (8, 0)], ids=str)
def test_scalars_and_empty_tensors_go_through_everything(shape):
    q = quantized(*shape)
    for name in ("detach", "clone", "to bf16", "cpu"):
        assert KEPT[name](q).shape == shape
    q.add_(1)
    q.copy_(torch.zeros(shape))
    assert (q + 1).shape == q.dequantize().shape == shape
    assert is_quantized(q.view(-1)) if shape else q.view(1).shape == (1,)
    assert repr(q)


def test_nan_and_infinity_stay_where_they_are():
    q = quantizer(E5M2)(torch.tensor([float("nan"), float("inf"), 1.0]))
    assert q.dequantize().isnan().tolist() == [True, False, False]
    q.add_(1)
    assert q.isnan().tolist() == [True, False, False]
