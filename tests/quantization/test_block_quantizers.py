"""Quantizers with a scale per block: their bytes by brute force, their arguments, their tensors."""

from __future__ import annotations

import block_oracle
import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E4M3, ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

E4M3_DTYPE, E5M2_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2

#: Quantizer, the class of its tensors, and what brute force takes besides.
QUANTIZERS = {
    "1x128": (lambda **k: te.Float8BlockQuantizer(E4M3_DTYPE, block_scaling_dim=1, **k), {"pow2": True}),
    "128x128": (lambda **k: te.Float8BlockQuantizer(E4M3_DTYPE, **k), {"pow2": True}),
    "fp32 scales": (
        lambda **k: te.Float8BlockQuantizer(E5M2_DTYPE, block_scaling_dim=1, force_pow_2_scales=False, **k),
        {},
    ),
    "epsilon": (
        lambda **k: te.Float8BlockQuantizer(E4M3_DTYPE, force_pow_2_scales=False, amax_epsilon=2.5, **k),
        {"epsilon": 2.5},
    ),
    "mxfp8": (lambda **k: te.MXFP8Quantizer(E4M3_DTYPE, **k), {}),
    "mxfp8 e5m2": (lambda **k: te.MXFP8Quantizer(te.DType.kFloat8E5M2, **k), {}),
}
CLASSES = {"mxfp8": te.MXFP8Tensor, "mxfp8 e5m2": te.MXFP8Tensor}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(150, 200), (2, 70, 96), (130,), (256, 128)], ids=str)
def test_both_copies_are_those_of_brute_force(shape, name):
    make, options = QUANTIZERS[name]
    x = torch.randn(shape, dtype=torch.bfloat16)
    q = make()(x)
    assert type(q) is CLASSES.get(name, te.Float8BlockwiseQTensor)
    assert (q.shape, q.dtype) == (x.shape, x.dtype)
    block_oracle.assert_holds(q.quantized_storage, x, **options)


def test_columnwise_copies_lie_as_in_transformer_engine():
    x = torch.randn(64, 96)
    assert te.Float8BlockQuantizer(E4M3_DTYPE)(x)._columnwise_data.shape == (96, 64)
    assert te.MXFP8Quantizer(E4M3_DTYPE)(x)._columnwise_data.shape == (64, 96)
    assert te.MTFP8Quantizer(E4M3_DTYPE)(x)._columnwise_data.shape == (64, 96)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_dequantizes_is_the_sum_of_one_product_per_element(name):
    x = torch.randn(150, 200)
    q = QUANTIZERS[name][0]()(x)
    expected = block_oracle.cast(
        x, q.quantized_storage.mode, q.quantized_storage.format, rowwise=True, **QUANTIZERS[name][1]
    )
    assert torch.equal(q.dequantize().double(), torch.from_numpy(expected.values).float().double())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gradients_pass_straight_through(name):
    x = torch.randn(64, 64, requires_grad=True)
    (QUANTIZERS[name][0]()(x) * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((64, 64), 2.0))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("usages", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
def test_only_the_copies_asked_for_are_made(usages, name):
    q = QUANTIZERS[name][0](rowwise=usages[0], columnwise=usages[1])(torch.randn(64, 64))
    assert (q._rowwise_data is not None, q._columnwise_data is not None) == usages
    assert (q._rowwise_scale_inv is not None, q._columnwise_scale_inv is not None) == usages


@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_empty_tensor_is_refilled_in_place_and_a_noop_flag_skips_it(name):
    make, options = QUANTIZERS[name]
    quantizer, x = make(), torch.randn(150, 64)
    out = quantizer.make_empty((150, 64))
    scale_inv = out._rowwise_scale_inv
    assert (scale_inv == (127 if scale_inv.dtype == torch.uint8 else 1)).all()
    addresses = [buffer.data_ptr() for buffer in out.quantized_storage.tensors()]
    assert quantizer.quantize(x, out=out) is out
    assert [buffer.data_ptr() for buffer in out.quantized_storage.tensors()] == addresses
    block_oracle.assert_holds(out.quantized_storage, x, **options)
    quantizer.update_quantized(x * 3, out, noop_flag=torch.ones(1))
    block_oracle.assert_holds(out.quantized_storage, x, **options)


BAD = {
    "dim": (lambda: te.Float8BlockQuantizer(E4M3_DTYPE, block_scaling_dim=3), "block_scaling_dim"),
    "dim bool": (lambda: te.Float8BlockQuantizer(E4M3_DTYPE, block_scaling_dim=True), "block_scaling_dim"),
    "epsilon": (lambda: te.Float8BlockQuantizer(E4M3_DTYPE, amax_epsilon=-1.0), "amax_epsilon"),
    "epsilon nan": (lambda: te.Float8BlockQuantizer(E4M3_DTYPE, amax_epsilon=float("nan")), "amax_epsilon"),
    "pow2": (lambda: te.Float8BlockQuantizer(E4M3_DTYPE, force_pow_2_scales=1), "force_pow_2_scales"),
    "dtype": (lambda: te.Float8BlockQuantizer(torch.float16), "Float8BlockQuantizer"),
    "mx dtype": (lambda: te.MXFP8Quantizer(te.DType.kFloat4E2M1), "MXFP8Quantizer"),
    "mx squares": (lambda: te.MXFP8Quantizer(E4M3_DTYPE, with_2d_quantization=1), "with_2d_quantization"),
    "mt block": (lambda: te.MTFP8Quantizer(E4M3_DTYPE, 1, 64), "block_m, block_n"),
    "mt rows": (lambda: te.MTFP8Quantizer(E4M3_DTYPE, 64), "block_m, block_n"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case):
    make, name = BAD[case]
    with pytest.raises(ArgumentError, match=name):
        make()


def test_a_tensor_class_takes_storages_of_its_own_modes_only():
    storage = te.MXFP8Quantizer(E4M3_DTYPE)(torch.ones(32, 32)).quantized_storage
    with pytest.raises(ArgumentError, match=r"Float8BlockwiseQTensor.*block_128x128, block_1x128"):
        te.Float8BlockwiseQTensor(storage)


def test_moore_threads_columnwise_copies_keep_their_order_whatever_a_backend_reads():
    quantizer = te.MTFP8Quantizer(E4M3_DTYPE)
    assert quantizer.ordered(ColumnwiseOrder.TRANSPOSED) is quantizer
    mx = te.MXFP8Quantizer(E4M3_DTYPE).ordered(ColumnwiseOrder.TRANSPOSED)
    assert mx(torch.ones(64, 96))._columnwise_data.shape == (96, 64)


def test_a_quantizer_refuses_a_target_of_another_mode():
    out = te.Float8BlockQuantizer(E4M3_DTYPE).make_empty((64, 64))
    with pytest.raises(ArgumentError, match="mode"):
        te.MXFP8Quantizer(E4M3_DTYPE).update_quantized(torch.ones(64, 64), out)


def test_an_internal_quantizer_gives_a_storage_and_no_tensor():
    quantizer = te.MXFP8Quantizer(E4M3_DTYPE)
    quantizer.internal = True
    made = quantizer(torch.ones(32, 32))
    assert isinstance(made, QuantizedStorage)
    assert not isinstance(made, torch.Tensor)
    assert (made.format, made.mode) == (E4M3, ScalingMode.MXFP8)
