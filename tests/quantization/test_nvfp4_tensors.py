"""NVFP4Quantizer and NVFP4Tensor; what they hold is the business of tests/backends/cpu_reference/test_nvfp4_cast.py."""

from __future__ import annotations

import copy
import io
import pickle

import nvfp4_by_hand
import pytest
import torch

import te_hal.modules as te
from te_hal import ops
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import ArgumentError, UnsupportedError

RHT = {"with_rht": True, "with_post_rht_amax": True}
KINDS = {"plain": {}, "squares": {"with_2d_quantization": True}, "transformed": RHT}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def buffers(tensor: te.QuantizedTensor) -> list[torch.Tensor]:
    return [t for t in tensor.quantized_storage.tensors() if t is not None]


@EVERY_KIND
def test_attributes_are_transformer_engines_in_its_shapes(kind: str) -> None:
    x = drawn(144, 96)
    q = te.NVFP4Quantizer(**KINDS[kind])(x)
    assert type(q) is te.NVFP4Tensor
    assert (q._rowwise_data.shape, q._columnwise_data.shape) == ((144, 48), (96, 72))
    assert (q._rowwise_scale_inv.shape, q._columnwise_scale_inv.shape) == ((256, 8), (128, 12))
    assert (q._fp4_dtype, q._nvfp4_e4m3_max, q._row_scaled_nvfp4) == (te.DType.kFloat4E2M1, 448, False)
    expected = nvfp4_by_hand.cast(x, square=kind == "squares")
    assert torch.equal(q._rowwise_scale_inv[:144, :6], torch.from_numpy(expected.scales))
    assert q._amax_rowwise.item() == x.abs().max().item()
    assert q._amax_columnwise.shape == (1,)


@EVERY_KIND
def test_copies_and_pickles_hold_the_same_bytes_and_share_nothing(kind: str) -> None:
    """Case B46."""
    q = te.NVFP4Quantizer(**KINDS[kind])(drawn(32, 48)).requires_grad_()
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    with torch.serialization.safe_globals([rebuild_quantized_tensor]):
        loaded = torch.load(file, weights_only=True)
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), loaded):
        assert type(other) is te.NVFP4Tensor
        assert (other.shape, other.dtype, other.requires_grad) == (q.shape, q.dtype, True)
        for mine, theirs in zip(buffers(q), buffers(other), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()


@EVERY_KIND
def test_another_nominal_dtype_or_device_keeps_the_codes(kind: str) -> None:
    """Case B47."""
    q = te.NVFP4Quantizer(**KINDS[kind])(drawn(32, 48))
    for other, dtype in (
        (q.to(torch.float16), torch.float16),
        (q.to(torch.float32), torch.float32),
        (q.cpu(), torch.bfloat16),
    ):
        assert (type(other), other.dtype) == (te.NVFP4Tensor, dtype)
        assert all(map(torch.equal, buffers(other), buffers(q)))


def test_views_keep_the_last_dimension_and_others_dequantize() -> None:
    q = te.NVFP4Quantizer()(drawn(32, 48))
    viewed = q.view(2, 16, 48)
    assert type(viewed) is te.NVFP4Tensor
    assert torch.equal(viewed.dequantize(), q.dequantize().view(2, 16, 48))
    assert type(q.view(48, 32)) is torch.Tensor


@EVERY_KIND
def test_parts_along_the_first_dimension_decode_to_the_whole_and_stay_packed_in_blocks_of_16(kind: str) -> None:
    q = te.NVFP4Quantizer(**KINDS[kind])(drawn(64, 32))
    for sizes, kept in (([16, 48], True), ([32, 32], True), ([8, 56], False)):
        parts = q.split(sizes)
        assert {type(part) for part in parts} == {te.NVFP4Tensor if kept else torch.Tensor}
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), q.dequantize())
    part = q.split(16)[1]
    assert part._rowwise_data.data_ptr() == q._rowwise_data[16:].data_ptr()


def test_squares_give_the_missing_copy_and_rows_of_16_refuse_it() -> None:
    whole = te.NVFP4Quantizer(with_2d_quantization=True)(drawn(2, 24, 32))
    for dropped in ("rowwise_usage", "columnwise_usage"):
        q = te.NVFP4Quantizer(with_2d_quantization=True)(drawn(2, 24, 32))
        q.update_usage(**{dropped: False})
        assert len(buffers(q)) == 2
        q.update_usage(**{dropped: True})
        assert torch.equal(q._rowwise_data, whole._rowwise_data)
        assert torch.equal(q._columnwise_data, whole._columnwise_data)
        assert torch.equal(q._rowwise_scale_inv[:48, :2], whole._rowwise_scale_inv[:48, :2])
        assert torch.equal(q._columnwise_scale_inv[:32, :3], whole._columnwise_scale_inv[:32, :3])
        assert q._amax_rowwise == q._amax_columnwise == whole._amax_rowwise
    q = te.NVFP4Quantizer(columnwise=False)(drawn(32, 32))
    with pytest.raises(UnsupportedError, match="columnwise copy wanted from the rowwise one"):
        q.update_usage(columnwise_usage=True)


@EVERY_KIND
def test_writing_in_place_quantizes_into_the_same_memory(kind: str) -> None:
    quantizer = te.NVFP4Quantizer(**KINDS[kind])
    q, x = quantizer(drawn(32, 48)), drawn(32, 48) * 3 + 1
    held = [t.data_ptr() for t in buffers(q)]
    q.copy_(x)
    assert [t.data_ptr() for t in buffers(q)] == held
    assert torch.equal(q.dequantize(), quantizer(x).dequantize())
    q.zero_()
    assert not q.dequantize().any()


def test_an_empty_tensor_has_factors_of_1() -> None:
    q = te.NVFP4Quantizer().make_empty((32, 48), dtype=torch.bfloat16)
    q._rowwise_data.fill_(0x21)
    assert torch.equal(q.dequantize(), torch.tensor([0.5, 1.0]).repeat(32, 24).bfloat16())


@EVERY_KIND
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
def test_it_prints_its_values_or_says_that_they_are_transformed(kind: str, usage: str) -> None:
    q = te.NVFP4Quantizer(**KINDS[kind])(drawn(16, 16))
    q.update_usage(rowwise_usage=usage == "rowwise", columnwise_usage=usage == "columnwise")
    text = repr(q)
    assert f"E2M1/{q.quantized_storage.mode.value}/{usage}" in text
    if (kind, usage) == ("transformed", "columnwise"):
        assert "transformed" in text
    else:
        assert repr(q.dequantize()).splitlines()[0].removeprefix("tensor(") in text


def test_chance_draws_from_torchs_default_generator() -> None:
    quantizer, x = te.NVFP4Quantizer(stochastic_rounding=True), drawn(32, 48)
    torch.manual_seed(5)
    first, second = quantizer(x), quantizer(x)
    torch.manual_seed(5)
    again = quantizer(x)
    assert torch.equal(first._rowwise_data, again._rowwise_data)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    state = torch.get_rng_state()
    te.NVFP4Quantizer()(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_pass_straight_through() -> None:
    x = drawn(16, 32).requires_grad_()
    te.NVFP4Quantizer()(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_tensor_goes_into_a_product_by_its_storage() -> None:
    q = te.NVFP4Quantizer()(drawn(32, 48))
    assert ops.gemm(q.quantized_storage, q.quantized_storage).shape == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fp4_dtype": te.DType.kFloat8E4M3}, ArgumentError, "fp4_dtype: .*kFloat4E2M1"),
        ({"with_rht": True}, ArgumentError, "with_post_rht_amax: got False; accepted: True"),
        ({"with_post_rht_amax": True}, ArgumentError, "with_post_rht_amax: got True; accepted: False"),
        ({"with_2d_quantization": True, **RHT}, ArgumentError, "with_2d_quantization"),
        ({"with_2d_quantization": True, "stochastic_rounding": True}, ArgumentError, "with_2d_quantization"),
        ({"stochastic_rounding": 1}, ArgumentError, "stochastic_rounding: got 1"),
        ({"row_scaled_nvfp4": True}, UnsupportedError, "row_scaled_nvfp4: .*no op has a scale per row"),
        ({"nvfp4_use_4over6": True}, UnsupportedError, "nvfp4_use_4over6: .*4-over-6"),
        ({"nvfp4_e4m3_max": 256}, UnsupportedError, "nvfp4_e4m3_max: .*4-over-6"),
        ({"nvfp4_4over6_err_mode": "MSE"}, UnsupportedError, "nvfp4_4over6_err_mode"),
        (
            {"with_rht": True, "with_post_rht_amax": True, "with_random_sign_mask": False},
            UnsupportedError,
            "with_random_sign_mask: .*one set of signs",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_is_refused_by_name(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"NVFP4Quantizer: {message}"):
        te.NVFP4Quantizer(**arguments)
