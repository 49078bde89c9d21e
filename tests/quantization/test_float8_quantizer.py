"""Float8Quantizer: bytes against ml_dtypes, the amax it records, usages, refilling, and refused arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp8_codes import codes_of

import te_hal.modules as te
from te_hal.schema import formats
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.storage import QuantizedStorage

FORMATS = {
    "e4m3": (torch.float8_e4m3fn, te.DType.kFloat8E4M3, formats.E4M3),
    "e5m2": (torch.float8_e5m2, te.DType.kFloat8E5M2, formats.E5M2),
}
E4M3 = torch.float8_e4m3fn


def make(dtype: object = E4M3, scale: float = 1.0, **usages: bool) -> te.Float8Quantizer:
    return te.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **usages)


def bytes_of(values: torch.Tensor, scale: float, format: str) -> torch.Tensor:
    """The codes by ml_dtypes, clamped first; NaN is 0x7F."""
    return torch.from_numpy(codes_of(values.float().numpy(), FORMATS[format][2], scale))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.37, 1000.0])
def test_codes_are_those_of_ml_dtypes_after_clamping(format, dtype, scale):
    torch.manual_seed(1)
    x = (torch.randn(24, 40) * 30).to(dtype)
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    q = make(FORMATS[format][0], scale)(x)
    assert torch.equal(q._data, bytes_of(x, scale, format))
    assert torch.equal(q._transpose, bytes_of(x, scale, format).t())
    assert q._scale_inv.item() == np.float32(1.0) / np.float32(scale)
    assert q.dtype == dtype


def test_overflow_saturates_and_nan_stays_on_every_torch():
    x = torch.tensor([1000.0, 448.0, 464.0, 465.0, -1000.0, float("nan")])
    q = make()(x)
    assert q._data.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]
    assert q.dequantize()[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    assert q.dequantize()[5].isnan()


def test_a_te_dtype_code_names_the_same_format():
    for dtype, code, _ in FORMATS.values():
        assert make(dtype).format is make(code).format is make(int(code)).format
        assert make(dtype).dtype is code


def test_amax_is_the_running_maximum_of_magnitudes_before_scaling():
    quantizer = make(scale=100.0)
    for values, expected in (([-5.0, 0.1], 5.0), ([2.0, 3.0], 5.0), ([float("nan"), -7.0], 7.0), ([], 7.0)):
        quantizer(torch.tensor(values))
        assert quantizer.amax.item() == expected
    quantizer(torch.tensor([float("-inf")]))
    assert quantizer.amax.item() == float("inf")


def test_calibration_records_the_magnitude_and_nothing_else():
    quantizer = make(scale=3.0)
    x = torch.full((4, 8), -5.0)
    x[0, 0] = 0.1
    assert quantizer.calibrate(x) is None
    assert (quantizer.amax.item(), quantizer.scale.item()) == (5.0, 3.0)
    quantizer.calibrate(torch.ones(3))
    assert quantizer.amax.item() == 5.0


def test_scale_and_amax_are_kept_by_reference():
    scale, amax = torch.ones(1), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    scale.fill_(2.0)
    assert quantizer(torch.tensor([3.0]))._data.item() == bytes_of(torch.tensor(3.0), 2.0, "e4m3").item()
    assert amax.item() == 3.0


USAGES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


@pytest.mark.parametrize("usage", USAGES)
def test_usages_decide_which_copies_are_made(usage):
    rowwise, columnwise = USAGES[usage]
    for quantizer in (make(rowwise=rowwise, columnwise=columnwise), make()):
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        assert quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        for q in (quantizer(torch.randn(16, 32)), quantizer.make_empty((16, 32))):
            assert (q._data is not None, q._transpose is not None) == (rowwise, columnwise)
            assert q._transpose_invalid is not columnwise


@pytest.mark.parametrize("usage", ["x", 1, 0.0])
def test_a_usage_that_is_no_bool_is_refused_and_changes_nothing(usage):
    quantizer = make()
    with pytest.raises(ArgumentError, match="set_usage: columnwise"):
        quantizer.set_usage(rowwise=False, columnwise=usage)
    assert quantizer.rowwise_usage


@pytest.mark.parametrize("flag", [torch.zeros(2), 1.0, "yes"], ids=repr)
def test_a_noop_flag_of_another_shape_or_type_is_refused(flag):
    quantizer = make()
    q = quantizer(torch.ones(3))
    with pytest.raises(ArgumentError, match="noop_flag"):
        quantizer.update_quantized(torch.ones(3), q, noop_flag=flag)


def test_set_usage_changes_only_what_it_is_told():
    quantizer = make()
    quantizer.set_usage(columnwise=False)
    quantizer.set_usage()
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}


def test_without_any_usage_quantizing_is_refused():
    quantizer = make(rowwise=False, columnwise=False)
    with pytest.raises(ArgumentError, match="neither rowwise nor columnwise"):
        quantizer(torch.ones(8))
    with pytest.raises(ArgumentError, match="neither rowwise nor columnwise"):
        quantizer.make_empty((8,))


@pytest.mark.parametrize("shape", [(), (0,), (0, 16), (16, 0), (5,), (2, 3, 4, 8)], ids=str)
def test_any_shape_is_taken(shape):
    x = torch.randn(shape)
    q = make(scale=10.0)(x)
    assert q.shape == x.shape
    assert torch.equal(q._data, bytes_of(x, 10.0, "e4m3").reshape(shape))
    assert q._transpose.shape == (*shape[-1:], *shape[:-1])
    assert torch.equal(q._transpose, q._data.movedim(-1, 0) if shape else q._data)
    assert q.dequantize().shape == x.shape


def test_strides_of_the_source_do_not_matter():
    x = torch.randn(6, 4, 10)
    for each in (x.transpose(0, 2), x[::2, :, 1::3], x[:1].expand(3, 4, 10)):
        q = make(scale=20.0)(each)
        assert torch.equal(q._data, bytes_of(each.contiguous(), 20.0, "e4m3"))


def test_the_nominal_dtype_can_be_chosen():
    q = make()(torch.randn(8), dtype=torch.bfloat16)
    assert q.dtype == q.dequantize().dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn, "bf16"], ids=str)
def test_another_nominal_dtype_is_refused(dtype):
    with pytest.raises(ArgumentError, match=r"Float8Quantizer: dtype: got .*torch.bfloat16"):
        make()(torch.randn(8), dtype=dtype)
    with pytest.raises(ArgumentError, match="Float8Quantizer: dtype"):
        make().make_empty((8,), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_a_source_of_another_dtype_is_refused_with_four_facts(dtype):
    quantizer = make()
    with pytest.raises(ValueError, match="quantize: input") as raised:
        quantizer(torch.ones(8, dtype=dtype))
    assert str(dtype) in raised.value.got
    assert "torch.bfloat16" in raised.value.accepted
    assert raised.value.todo
    assert quantizer.amax.item() == 0.0


@pytest.mark.parametrize("source", [[1.0, 2.0], 3.0, None, np.ones(3)], ids=["list", "float", "None", "array"])
def test_a_source_that_is_no_tensor_is_refused(source):
    for call in (make(), make().calibrate, lambda x: make().update_quantized(x, make()(torch.ones(2)))):
        with pytest.raises(ArgumentTypeError, match=r"Float8Quantizer: \w+: got a .*a plain torch.Tensor"):
            call(source)


def test_a_quantized_source_is_refused_with_what_to_do():
    q = make()(torch.ones(8))
    for call in (make(), make().calibrate, lambda x: make().update_quantized(x, q)):
        with pytest.raises(ArgumentTypeError, match=r"got a Float8Tensor.*dequantize\(\) first"):
            call(q)


BAD_STATE = {
    "two elements": torch.ones(2),
    "fp64": torch.ones(1, dtype=torch.float64),
    "no tensor": 1.0,
    "None": None,
    "empty": torch.ones(0),
}


@pytest.mark.parametrize("case", BAD_STATE)
def test_a_scale_or_amax_that_is_no_fp32_number_is_refused(case):
    with pytest.raises(ArgumentError, match="Float8Quantizer: scale"):
        te.Float8Quantizer(BAD_STATE[case], torch.zeros(1), E4M3)
    with pytest.raises(ArgumentError, match="Float8Quantizer: amax"):
        te.Float8Quantizer(torch.ones(1), BAD_STATE[case], E4M3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fnuz, te.DType.kFloat4E2M1, "e4m3", None], ids=str)
def test_another_element_format_is_refused(dtype):
    with pytest.raises(ArgumentError, match="Float8Quantizer: got dtype"):
        make(dtype)


# Refilling


def test_refilling_writes_every_copy_that_is_there():
    for usage in USAGES.values():
        q = make(rowwise=usage[0], columnwise=usage[1])(torch.zeros(4, 6))
        buffers = [each.data_ptr() for each in q.quantized_storage.tensors() if each is not None]
        x = torch.randn(4, 6)
        quantizer = make(scale=50.0, rowwise=False, columnwise=False)
        assert quantizer.update_quantized(x, q) is q
        assert quantizer.amax.item() == x.abs().max().item()
        expected = bytes_of(x, 50.0, "e4m3")
        assert q._data is None or torch.equal(q._data, expected)
        assert q._transpose is None or torch.equal(q._transpose, expected.t())
        assert [each.data_ptr() for each in q.quantized_storage.tensors() if each is not None] == buffers
        assert q._scale_inv.item() == np.float32(1) / np.float32(50)


def test_refilling_keeps_the_order_that_the_tensor_was_made_with():
    for order, other in (("same", "transposed"), ("transposed", "same")):
        quantizer = make()
        quantizer.columnwise_order = order
        q = quantizer(torch.zeros(2, 3))
        quantizer.columnwise_order = other
        x = torch.randn(2, 3)
        quantizer.update_quantized(x, q)
        expected = bytes_of(x, 1.0, "e4m3")
        assert torch.equal(q._transpose, expected if order == "same" else expected.t())


def test_quantize_with_out_refills_and_returns_out():
    q = make()(torch.zeros(3))
    assert make().quantize(torch.ones(3, requires_grad=True), out=q) is q
    assert q.dequantize().tolist() == [1.0] * 3
    assert not q.requires_grad


@pytest.mark.parametrize(("flag", "written"), [(1.0, False), (0.0, True), (2.0, True)])
def test_a_noop_flag_of_1_writes_and_records_nothing(flag, written):
    q, quantizer = make()(torch.zeros(3)), make()
    quantizer.update_quantized(torch.full((3,), 2.0), q, noop_flag=torch.tensor([flag]))
    assert q.dequantize().tolist() == [2.0 * written] * 3
    assert quantizer.amax.item() == 2.0 * written


def test_refilling_is_seen_as_a_write_by_autograd():
    q = make()(torch.zeros(3))
    before = q._version
    make().update_quantized(torch.ones(3), q)
    assert q._version > before
    x = torch.ones(3, requires_grad=True)
    product = x * q
    q.quantize_(torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


MISFITS = {
    "shape": (torch.ones(4), "shape"),
    "rank": (torch.ones(1, 3), "shape"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_source_of_another_shape_is_refused_and_nothing_changes(case):
    q, quantizer = make()(torch.zeros(3)), make()
    with pytest.raises(ArgumentError, match="quantize"):
        quantizer.update_quantized(MISFITS[case][0], q)
    assert q.dequantize().tolist() == [0.0] * 3
    assert quantizer.amax.item() == 0.0


def test_a_destination_of_another_format_or_type_is_refused():
    with pytest.raises(ArgumentError, match="E5M2"):
        make().update_quantized(torch.ones(3), make(torch.float8_e5m2)(torch.zeros(3)))
    with pytest.raises(ArgumentTypeError, match=r"update_quantized: dst: got a Tensor"):
        make().update_quantized(torch.ones(3), torch.zeros(3))


def test_an_empty_tensor_to_refill_has_scale_inv_1_and_its_own_settings():
    q = make(torch.float8_e5m2).make_empty([4, 6], dtype=torch.bfloat16, requires_grad=True)
    assert (q.shape, q.dtype, q.requires_grad) == ((4, 6), torch.bfloat16, True)
    assert (q._scale_inv.item(), q._fp8_dtype) == (1.0, te.DType.kFloat8E5M2)
    assert (q._data.shape, q._transpose.shape, q._data.dtype) == ((4, 6), (6, 4), torch.uint8)


def test_make_empty_uses_torchs_default_device():
    assert make().make_empty((2, 2), device="meta").device.type == "meta"
    with torch.device("meta"):
        assert (
            te.Float8Quantizer(torch.ones(1, device="cpu"), torch.zeros(1, device="cpu"), E4M3)
            .make_empty((2, 2))
            .is_meta
        )


# Autograd and copies


def test_the_gradient_passes_straight_through():
    x = torch.randn(8, requires_grad=True)
    q = make(scale=0.01)(x)
    assert q.requires_grad
    weights = torch.randn(8)
    (q * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_a_half_precision_source_gets_a_gradient_of_its_own_dtype():
    x = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    make()(x, dtype=torch.float32).dequantize().sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [1.0] * 8


def test_under_no_grad_there_is_no_graph():
    x = torch.randn(8, requires_grad=True)
    with torch.no_grad():
        q = make()(x)
    assert not q.requires_grad
    assert q.grad_fn is None


def test_an_internal_quantizer_gives_a_bare_storage():
    quantizer = make()
    quantizer.internal = True
    storage = quantizer(torch.randn(8, requires_grad=True), dtype=torch.bfloat16)
    assert isinstance(storage, QuantizedStorage)
    assert storage.dtype == torch.bfloat16


def test_a_copy_shares_scale_and_amax_but_not_usages():
    quantizer = make()
    copied = quantizer.copy()
    copied.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert copied.scale is quantizer.scale
    assert copied.amax is quantizer.amax
