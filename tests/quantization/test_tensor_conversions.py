"""What float(), half() and bfloat16() make of quantized tensors, parts along other dimensions, and .data."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling

E4M3 = te.DType.kFloat8E4M3
QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, device="cpu"),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
}
RECIPES = {"delayed": DelayedScaling, "1x128": Float8BlockScaling, "mxfp8": MXFP8BlockScaling}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_quantized_tensor_in_a_dtype_by_name_is_plain(kind, dtype):
    q = QUANTIZERS[kind]()(torch.randn(64, 128))
    method = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    result = getattr(q, method)()
    assert (type(result), result.dtype) == (torch.Tensor, dtype)
    assert torch.equal(result, q.dequantize(dtype=torch.float32).to(dtype))


def test_gradients_pass_through_float():
    x = torch.randn(32, 32, requires_grad=True)
    (QUANTIZERS["current"]()(x).float() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((32, 32), 3.0))


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.float, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_module_converted_as_a_whole_keeps_its_codes(name, convert):
    with te.quantized_model_init(recipe=RECIPES[name]()):
        model = torch.nn.Sequential(te.Linear(128, 128))
    codes = model[0].weight._rowwise_data.clone()
    convert(model)
    assert isinstance(model[0].weight, te.QuantizedTensor)
    assert torch.equal(model[0].weight._rowwise_data, codes)


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_a_tensor_with_one_scale_splits_along_any_dimension(dim):
    q = QUANTIZERS["current"]()(torch.randn(8, 6, 4))
    parts = q.chunk(2, dim=dim)
    assert all(isinstance(part, te.Float8Tensor) for part in parts)
    for part, expected in zip(parts, q.dequantize().chunk(2, dim=dim), strict=True):
        assert torch.equal(part.dequantize(), expected)
    assert [part.shape for part in q.split([1, 2, 3], dim=1)] == [(8, 1, 4), (8, 2, 4), (8, 3, 4)]


def test_scales_per_block_split_into_plain_parts_along_other_dimensions():
    q = QUANTIZERS["mxfp8"]()(torch.randn(64, 64))
    assert [type(part) for part in q.chunk(2, dim=1)] == [torch.Tensor] * 2


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_plain_tensor_of_another_shape_or_dtype_given_to_data_is_quantized_anew(kind):
    q, given = QUANTIZERS[kind]()(torch.randn(64, 128)), torch.randn(32, 64, dtype=torch.bfloat16)
    q.data = given
    assert (type(q), q.shape, q.dtype) == (type(QUANTIZERS[kind]()(given)), given.shape, given.dtype)
    expected = given.double()
    assert (q.dequantize().double() - expected).norm() < 0.15 * expected.norm()


def test_the_quantizer_of_a_tensor_makes_another_of_the_same_bytes():
    with te.quantized_model_init(recipe=MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        weight = te.Linear(64, 64).weight
    quantizer = weight._get_quantizer()
    made = quantizer.make_empty(shape=weight.shape, dtype=weight.dtype, device=weight.device)
    quantizer.update_quantized(weight.get_high_precision_init_val(), made)
    assert torch.equal(made._rowwise_data, weight._rowwise_data)


def test_without_the_transform_the_sign_mask_says_nothing():
    x = torch.randn(32, 64)
    torch.manual_seed(0)
    without = te.NVFP4Quantizer(with_random_sign_mask=False)(x)
    assert torch.equal(without._rowwise_data, te.NVFP4Quantizer()(x)._rowwise_data)


SHAPED = {
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "128x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "mtfp8": lambda: te.MTFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "nvfp4 in squares": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
}


@pytest.mark.parametrize("shape", [(64, 96), (4, 32, 256), (1024, 16)], ids=str)
@pytest.mark.parametrize("kind", SHAPED)
def test_a_quantizer_tells_the_shapes_that_its_tensors_have(kind, shape):
    quantizer = SHAPED[kind]()
    q = quantizer(torch.randn(shape))
    assert quantizer.get_scale_shape(shape) == q._rowwise_scale_inv.shape
    assert quantizer.get_scale_shape(shape, columnwise=True) == q._columnwise_scale_inv.shape
    if "nvfp4" not in kind:  # whose codes lie two in a byte
        assert quantizer.get_columnwise_shape(shape) == q._columnwise_data.shape


def test_the_parts_of_a_hybrid_tensor_have_their_public_names():
    quantizer = te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer())
    q = quantizer(torch.randn(64, 64))
    assert isinstance(q.rowwise_sub_storage, te.MXFP8TensorStorage)
    assert isinstance(q.columnwise_sub_storage, te.NVFP4TensorStorage)
