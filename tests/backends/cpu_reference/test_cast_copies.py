"""What quantize writes where: copies, orders, strides, pieces, storages that are refilled, amax on the way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fp8_codes import codes_of, values_of

from te_hal.backends.cpu_reference import chunks
from te_hal.backends.cpu_reference.cast import dequantize, quantize
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E4M3, E5M2

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = math.nan
ONE = torch.ones(1)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5), (0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_copies_of_any_rank_hold_the_same_codes(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    expected = codes_of(values.numpy(), E4M3)
    for order in ("transposed", "same"):
        storage = quantize(values, ONE, dtype=E4M3.dtype, columnwise=True, columnwise_order=order)
        turned = np.moveaxis(expected, -1, 0) if shape and order == "transposed" else expected
        assert np.array_equal(storage.rowwise_data.numpy(), expected)
        assert np.array_equal(storage.columnwise_data.numpy(), turned)
        only = quantize(values, ONE, dtype=E4M3.dtype, rowwise=False, columnwise=True, columnwise_order=order)
        assert only.rowwise_data is None
        assert torch.equal(only.columnwise_data, storage.columnwise_data)
        assert torch.equal(dequantize(only), dequantize(storage))


STRIDED = {
    "turned": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "every other row": lambda x: x[::2],
    "one row repeated": lambda x: x[:1].expand(9, -1),
    "one number repeated": lambda x: x[0, :1].expand(6, 7),
    "three dimensions, permuted": lambda x: x.view(4, 5, 6).permute(2, 0, 1),
    "one dimension, strided": lambda x: x[:, 3],
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 19])
def test_strides_and_pieces_make_no_difference(
    view: Callable[[torch.Tensor], torch.Tensor], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    values = view(torch.randn(10, 12, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16))
    running = torch.zeros(1)
    storage = quantize(values, torch.tensor([50.0]), amax=running, dtype=E5M2.dtype, columnwise=True)
    expected = codes_of(values.float().numpy(), E5M2, 50.0)
    assert np.array_equal(storage.rowwise_data.numpy(), expected)
    assert np.array_equal(storage.columnwise_data.numpy(), np.moveaxis(expected, -1, 0))
    assert running.item() == values.float().abs().max().item()
    restored = values_of(storage.rowwise_data, E5M2) * storage.rowwise_scale_inv.numpy()
    assert np.array_equal(dequantize(storage, out_dtype=torch.float32).numpy(), restored)


@pytest.mark.parametrize("position", [0, 50, 119])
def test_amax_in_the_same_pass_leaves_nan_out(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 24)
    values = torch.randn(10, 12, generator=torch.Generator().manual_seed(10))
    values.view(-1)[position] = NAN
    running = torch.tensor([0.25])
    quantize(values, ONE, amax=running, dtype=E4M3.dtype)
    assert running.item() == np.nanmax(np.abs(values.numpy()))


def test_amax_is_that_of_the_input_and_keeps_what_is_larger() -> None:
    running = torch.tensor([3.0])
    quantize(torch.tensor([-2.0]), torch.tensor([100.0]), amax=running, dtype=E4M3.dtype)
    assert running.item() == 3.0
    quantize(torch.tensor([-5.0]), torch.tensor([100.0]), amax=running, dtype=E4M3.dtype)
    quantize(torch.empty(0, 3), torch.tensor([100.0]), amax=running, dtype=E4M3.dtype)
    assert running.item() == 5.0


@pytest.mark.parametrize("order", ["transposed", "same"])
@pytest.mark.parametrize("copies", [(True, True), (True, False), (False, True)], ids=str)
def test_out_is_refilled_in_its_own_memory(copies: tuple[bool, bool], order: str) -> None:
    rowwise, columnwise = copies
    asked = {"dtype": E5M2.dtype, "rowwise": rowwise, "columnwise": columnwise, "columnwise_order": order}
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(11))
    out = quantize(torch.full((6, 10), NAN, dtype=torch.bfloat16), torch.tensor([NAN]), **asked)
    tensors = out.tensors()
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    assert quantize(values, torch.tensor([9.0]), out=out, **asked) is out
    fresh = quantize(values, torch.tensor([9.0]), **asked)
    for mine, theirs, address in zip(out.tensors(), fresh.tensors(), addresses, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.data_ptr() == address and torch.equal(mine, theirs))
    assert out.dtype == torch.bfloat16


def test_out_with_two_scale_inv_tensors_gets_both_written() -> None:
    out = quantize(torch.zeros(2, 2), ONE, dtype=E4M3.dtype, columnwise=True)
    row, _, column, _ = out.tensors()
    out = out.with_tensors((row, torch.tensor([NAN]), column, torch.tensor([NAN])))
    quantize(torch.ones(2, 2), torch.tensor([4.0]), out=out, dtype=E4M3.dtype, columnwise=True)
    assert [out.rowwise_scale_inv.item(), out.columnwise_scale_inv.item()] == [0.25, 0.25]


def test_scale_may_share_memory_with_the_scale_inv_of_out() -> None:
    out = quantize(torch.zeros(3), torch.tensor([8.0]), dtype=E4M3.dtype)
    quantize(torch.full((3,), 16.0), out.rowwise_scale_inv, out=out, dtype=E4M3.dtype)
    assert dequantize(out).tolist() == [16.0] * 3
    assert out.rowwise_scale_inv.item() == 8.0


def test_the_input_is_neither_changed_nor_given_a_gradient() -> None:
    values = torch.randn(4, 4, requires_grad=True)
    before, running = values.detach().clone(), torch.zeros(1)
    storage = quantize(values, torch.tensor([1000.0]), amax=running, dtype=E4M3.dtype, columnwise=True)
    assert torch.equal(values.detach(), before)
    assert not any(tensor.requires_grad for tensor in (*storage.tensors(), running, dequantize(storage)))


def test_the_default_device_and_dtype_are_not_asked() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            storage = quantize(torch.ones(2, 2, device="cpu"), torch.ones(1, device="cpu"), dtype=E4M3.dtype)
            assert dequantize(storage).device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)
    assert storage.rowwise_scale_inv.dtype == torch.float32


def test_no_scale_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"scale.*fp32"):
        quantize(torch.ones(2), dtype=E4M3.dtype)
