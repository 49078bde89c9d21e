"""Transformer Engine's storage classes: what internal quantizers give, what is built by hand, and the names."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from custom_recipes import BF16, E4M3
from hybrids import hybrid

import te_hal.modules as te
import te_hal.ops
from te_hal.quantization.hybrid_storage import values_of
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from te_hal.schema.storage import QuantizedStorage

QUANTIZERS = {
    "delayed": lambda: te.Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1), E4M3),
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "128x128": lambda: te.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "nvfp4 16x16": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
    "mtfp8": lambda: te.MTFP8Quantizer(E4M3),
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: hybrid(("mxfp8", "nvfp4")),
    "hybrid, plain": lambda: hybrid(("identity", "1x128")),
}
CLASSES = {
    "delayed": (te.Float8TensorStorage, te.Float8Tensor),
    "current": (te.Float8TensorStorage, te.Float8Tensor),
    "1x128": (te.Float8BlockwiseQTensorStorage, te.Float8BlockwiseQTensor),
    "128x128": (te.Float8BlockwiseQTensorStorage, te.Float8BlockwiseQTensor),
    "mxfp8": (te.MXFP8TensorStorage, te.MXFP8Tensor),
    "nvfp4": (te.NVFP4TensorStorage, te.NVFP4Tensor),
    "nvfp4 16x16": (te.NVFP4TensorStorage, te.NVFP4Tensor),
    "mtfp8": (te.QuantizedTensorStorage, te.MTFP8Tensor),
    "identity": (te.IdentityTensorStorage, te.IdentityTensor),
    "hybrid": (te.HybridQuantizedTensorStorage, te.HybridQuantizedTensor),
    "hybrid, plain": (te.HybridQuantizedTensorStorage, te.HybridQuantizedTensor),
}
EVERY = pytest.mark.parametrize("name", QUANTIZERS)
NAMED = [cls for cls, _ in dict.fromkeys(CLASSES.values()) if cls is not te.QuantizedTensorStorage]


def data(seed: int = 3) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(BF16)


def both(name: str) -> tuple[object, te.QuantizedTensor]:
    """The storage that an internal quantizer gives, and the tensor that it gives else."""
    quantizer = QUANTIZERS[name]()
    tensor = quantizer(data())
    quantizer.internal = True
    return quantizer(data()), tensor


@EVERY
def test_an_internal_quantizer_gives_the_class_of_its_format(name):
    storage, tensor = both(name)
    of_storage, of_tensor = CLASSES[name]
    assert type(storage) is of_storage
    assert type(tensor) is of_tensor
    for each in (storage, tensor):
        assert isinstance(each, te.QuantizedTensorStorage)
        assert [cls for cls in NAMED if isinstance(each, cls)] == [cls for cls in NAMED if cls is of_storage]
    assert not isinstance(data(), te.QuantizedTensorStorage)
    assert repr(storage).startswith(f"{of_storage.__name__}(")


@EVERY
def test_it_holds_what_the_tensor_holds(name):
    storage, tensor = both(name)
    assert torch.equal(storage.dequantize(), tensor.dequantize())
    assert (storage.size(), storage.size(1), storage.device) == (tensor.shape, 64, tensor.device)
    assert storage.get_usages() == tensor.get_usages()
    for found, expected in zip(storage.get_data_tensors(), tensor.get_data_tensors(), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
    assert torch.equal(storage.view(4, 8, 64).dequantize(), tensor.dequantize().view(4, 8, 64))
    with pytest.raises(ArgumentError, match="at least one of them"):
        storage.get_data_tensors(False, False)


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name != "mtfp8"])  # which has no class of its own
def test_its_class_builds_it_again_from_its_metadata(name):
    storage, _ = both(name)
    again = type(storage)(**{"fake_dtype": BF16, **storage.get_metadata()})
    assert type(again) is type(storage)
    assert again.kind is storage.kind
    assert torch.equal(again.dequantize(), storage.dequantize())
    assert again.get_usages() == storage.get_usages()


@pytest.mark.parametrize(
    "remake", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
@EVERY
def test_a_copy_is_of_the_same_class_and_kind(name, remake):
    storage, _ = both(name)
    again = remake(storage)
    assert type(again) is type(storage)
    assert again.kind is storage.kind
    assert torch.equal(again.dequantize(), storage.dequantize())


@EVERY
def test_it_is_quantized_into_and_copied_into_in_place(name):
    storage, _ = both(name)
    other = QUANTIZERS[name]()(data(8))
    storage.quantize_(data(8), noop_flag=torch.ones(1))
    assert not torch.equal(storage.dequantize(), other.dequantize())
    assert storage.quantize_(data(8)) is storage
    assert torch.equal(storage.dequantize(), other.dequantize())
    third, _ = both(name)
    third.copy_from_storage(other)
    assert torch.equal(third.dequantize(), other.dequantize())
    with pytest.raises(ArgumentTypeError, match="copy_from_storage"):
        third.copy_from_storage(data())


@pytest.mark.parametrize("name", ["current", "1x128", "mxfp8", "nvfp4", "hybrid"])
def test_a_copy_is_dropped_in_place_and_made_again_only_where_it_follows(name):
    storage, _ = both(name)
    storage.update_usage(columnwise_usage=False)
    assert storage.get_usages() == {"rowwise": True, "columnwise": False}
    if name == "current":
        storage.update_usage(columnwise_usage=True)
        assert torch.equal(storage._transpose, storage._data.t())
    else:
        with pytest.raises(UnsupportedError):
            storage.update_usage(columnwise_usage=True)
    with pytest.raises(ArgumentError):
        storage.update_usage(False, False)


@pytest.mark.parametrize("name", ["current", "1x128", "mxfp8", "nvfp4", "mtfp8"])
def test_ops_take_it_like_any_storage(name):
    storage, tensor = both(name)
    assert isinstance(storage, QuantizedStorage)
    plain = tensor.quantized_storage
    assert torch.equal(te_hal.ops.dequantize(storage), te_hal.ops.dequantize(plain))
    weight = QUANTIZERS[name]()(data(9)).quantized_storage
    assert torch.equal(te_hal.ops.gemm(storage, weight), te_hal.ops.gemm(plain, weight))


@EVERY
def test_a_backward_keeps_it_as_tensors(name):
    storage, _ = both(name)
    tensors, rebuilds = te.prepare_for_saving(data(), storage, None)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors if tensor is not None)
    plain, again, nothing = te.restore_from_saved(rebuilds, tensors)
    assert nothing is None
    assert torch.equal(plain, data())
    assert again.kind is storage.kind
    assert torch.equal(values_of(again), storage.dequantize())


def test_the_parts_of_a_hybrid_have_names_too():
    for each in both("hybrid, plain"):
        assert isinstance(each._rowwise_storage, te.IdentityTensorStorage)
        assert isinstance(each._columnwise_storage, te.Float8BlockwiseQTensorStorage)


REFUSED = {
    "swizzled": (
        lambda: te.MXFP8TensorStorage(None, None, None, None, te.DType.kFloat8E4M3, None, True),
        UnsupportedError,
        "with_gemm_swizzled_scales",
    ),
    "no codes": (
        lambda: te.Float8TensorStorage(data=None, fp8_scale_inv=torch.ones(1), fp8_dtype=te.DType.kFloat8E4M3),
        ArgumentError,
        "neither copy",
    ),
    "a buffer of another dtype": (
        lambda: te.Float8TensorStorage(data=data(), fp8_scale_inv=torch.ones(1), fp8_dtype=te.DType.kFloat8E4M3),
        ArgumentError,
        "rowwise_data",
    ),
    "an amax left out": (
        lambda: te.NVFP4TensorStorage(torch.zeros(16, 8, dtype=torch.uint8), None, None, None, None, None),
        ArgumentError,
        "amax_rowwise",
    ),
    "scales without padding": (
        lambda: te.NVFP4TensorStorage(
            *(torch.zeros(16, 8, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)),
            *(None, None, torch.ones(1), None),
        ),
        ArgumentError,
        "scale_inv",
    ),
    "no values": (lambda: te.IdentityTensorStorage(hp_data=None), ArgumentTypeError, "hp_data"),
    "no quantizer": (lambda: te.IdentityTensorStorage(hp_data=data()).quantize_(data()), StateError, "quantizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        make()
