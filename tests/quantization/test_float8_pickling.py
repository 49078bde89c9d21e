"""Float8Tensor copied, pickled and saved: the same bytes, nothing shared."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from float8_tensors import E4M3, E5M2, quantized, quantizer

import te_hal
import te_hal.modules as te
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema import formats
from te_hal.schema.errors import StateError
from te_hal.schema.storage import StorageKind


def through_file(q: te.Float8Tensor, *, weights_only: bool = False) -> te.Float8Tensor:
    file = io.BytesIO()
    torch.save({"q": q, "plain": torch.ones(2)}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["q"]


REMAKES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": through_file,
}

KINDS = {
    "both": lambda: quantized(4, 8),
    "rowwise": lambda: quantized(4, 8, columnwise=False),
    "columnwise": lambda: quantized(4, 8, rowwise=False),
    "e5m2": lambda: quantizer(E5M2)(torch.randn(4, 8)),
    "bf16": lambda: quantized(4, 8, dtype=torch.bfloat16),
    "leaf": lambda: quantized(4, 8).requires_grad_(),
    "scalar": quantized,
    "empty": lambda: quantized(0, 8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remake", REMAKES)
def test_a_copy_has_the_same_bytes_and_shares_none(remake, kind):
    q = KINDS[kind]()
    made = REMAKES[remake](q)
    assert type(made) is te.Float8Tensor
    assert (made.shape, made.dtype, made.requires_grad) == (q.shape, q.dtype, q.requires_grad)
    old, new = q.quantized_storage, made.quantized_storage
    assert new.kind is old.kind
    for one, other in zip(old.tensors(), new.tensors(), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)
            assert one.numel() == 0 or one.data_ptr() != other.data_ptr()
    assert torch.equal(made.dequantize(), q.dequantize())
    for buffer in new.tensors():
        if buffer is not None:
            buffer.zero_()
    assert old.rowwise_data is None or old.rowwise_data.any() or q.numel() == 0


def test_a_deep_copy_can_be_written_to_without_touching_the_originals_amax():
    scale, amax = torch.ones(1), torch.zeros(1)
    q = te.Float8Quantizer(scale, amax, E4M3)(torch.ones(2))
    made = copy.deepcopy(q)
    made.mul_(100)
    assert made.dequantize().tolist() == [96.0, 96.0] or made.dequantize().tolist() == [104.0, 104.0]
    assert q.dequantize().tolist() == [1.0, 1.0]
    assert amax.item() == 1.0


@pytest.mark.parametrize("remake", ["pickle", "torch.save"])
def test_a_loaded_tensor_has_no_quantizer_and_says_so(remake):
    made = REMAKES[remake](quantized(4, 8))
    with pytest.raises(StateError, match="a tensor without a quantizer"):
        made.add_(1)
    assert (made + 1).shape == (4, 8)


def test_weights_only_loading_works_once_the_function_is_allowed():
    q = quantized(4, 8)
    with pytest.raises(pickle.UnpicklingError, match="rebuild_quantized_tensor"):
        through_file(q, weights_only=True)
    with torch.serialization.safe_globals([rebuild_quantized_tensor]):
        made = through_file(q, weights_only=True)
    assert torch.equal(made._data, q._data)
    assert torch.equal(made._transpose, q._transpose)


@pytest.mark.parametrize("remake", REMAKES)
def test_a_parameter_stays_one_with_what_hangs_on_it(remake):
    parameter = torch.nn.Parameter(quantized(4, 8))
    parameter.main_grad = torch.full((4, 8), 3.0)
    made = REMAKES[remake](parameter)
    assert isinstance(made, torch.nn.Parameter)
    assert torch.equal(made.main_grad, parameter.main_grad)
    assert made.main_grad is not parameter.main_grad


def test_a_deep_copy_takes_the_gradient_along():
    q = quantized(4, 8).requires_grad_()
    q.grad = torch.ones(4, 8)
    made = copy.deepcopy(q)
    assert torch.equal(made.grad, q.grad)
    assert made.grad is not q.grad


def test_what_is_shared_inside_a_structure_stays_shared():
    q = quantized(4, 8)
    first, second = copy.deepcopy([q, q])
    assert first is second
    first, second = pickle.loads(pickle.dumps([q, q]))
    assert first is second


def test_a_result_that_autograd_follows_is_not_copied():
    q = quantizer()(torch.randn(4, 8, requires_grad=True))
    with pytest.raises(StateError, match="a leaf"):
        copy.deepcopy(q)
    assert torch.equal(copy.deepcopy(q.detach())._data, q._data)


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copied_storage_is_of_the_same_kind_and_finds_the_same_kernel(remake):
    storage = quantized(4, 8).quantized_storage
    made = remake(storage)
    assert made.kind is storage.kind
    assert torch.equal(te_hal.ops.dequantize(made), te_hal.ops.dequantize(storage))
    assert remake(storage.kind) is storage.kind
    assert isinstance(made.kind, StorageKind)


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copied_format_is_the_format(remake):
    """Also that of a copied quantizer: what it makes is taken on by a module without quantizing again."""
    for fmt in (formats.E4M3, formats.E5M2):
        assert remake(fmt) is fmt
    assert remake(quantizer(E5M2)).format is formats.E5M2
