"""Tensors with a scale per block under torch's operations, copied, saved, and with other usages."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import te_hal.modules as te
import te_hal.ops
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import ArgumentError, StateError, UnsupportedError

E4M3 = torch.float8_e4m3fn
QUANTIZERS = {
    "1x128": lambda **k: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1, **k),
    "128x128": lambda **k: te.Float8BlockQuantizer(E4M3, **k),
    "mxfp8": lambda **k: te.MXFP8Quantizer(E4M3, **k),
    "mtfp8 1x128": lambda **k: te.MTFP8Quantizer(E4M3, **k),
    "mtfp8 128x128": lambda **k: te.MTFP8Quantizer(E4M3, 128, **k),
}
SQUARE = ("128x128", "mtfp8 128x128")

ALL = pytest.mark.parametrize("name", QUANTIZERS)


def made(name: str, *shape: int, **usages: bool) -> te.QuantizedTensor:
    torch.manual_seed(3)
    return QUANTIZERS[name](**usages)(torch.randn(shape, dtype=torch.bfloat16))


def same_bytes(one: te.QuantizedTensor, other: te.QuantizedTensor) -> bool:
    """Codes and scales, by what they stand for: padding is never compared."""
    codes = [(a is None and b is None) or torch.equal(a, b) for a, b in zip(*map(codes_of, (one, other)), strict=True)]
    kinds = one.quantized_storage.kind is other.quantized_storage.kind
    return (
        kinds and all(codes) and torch.equal(one.dequantize(dtype=torch.float32), other.dequantize(dtype=torch.float32))
    )


def codes_of(q: te.QuantizedTensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return q._rowwise_data, q._columnwise_data


KEPT = {
    "detach": lambda q: q.detach(),
    "clone": lambda q: q.clone(),
    "data": lambda q: q.data,
    "merged rows": lambda q: q.view(-1, 192),
    "split rows": lambda q: q.reshape(2, 2, 64, 192),
    "to fp16": lambda q: q.to(torch.float16),
    "to fp32": lambda q: q.to(torch.float32),
    "cpu": lambda q: q.to("cpu", copy=True),
    "meta": lambda q: q.to("meta"),
    "empty_like": torch.empty_like,
    "empty_like elsewhere": lambda q: torch.empty_like(q, device="meta", dtype=torch.float16),
}


@ALL
@pytest.mark.parametrize("operation", KEPT)
def test_the_format_keeps_it_quantized(operation, name):
    q = made(name, 4, 64, 192)
    result, expected = KEPT[operation](q), KEPT[operation](q.dequantize())
    assert type(result) is type(q)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    if operation not in ("meta", "empty_like", "empty_like elsewhere"):  # these have no values
        values = q.dequantize(dtype=torch.float32).to(expected.dtype)
        assert torch.equal(result.dequantize(), values.reshape(expected.shape))
        assert all(buffer is not None for buffer in result.quantized_storage.tensors())


@ALL
def test_a_view_shares_bytes_and_a_clone_none(name):
    q = made(name, 4, 64, 192)
    viewed, cloned = q.view(256, 192), q.clone()
    for own, seen, copied in zip(*(t.quantized_storage.tensors() for t in (q, viewed, cloned)), strict=True):
        assert own.data_ptr() == seen.data_ptr() != copied.data_ptr()


@ALL
@pytest.mark.parametrize(
    "operation", [lambda q: q.view(-1), lambda q: q.view(96, 512), lambda q: q.t(), lambda q: q[1]]
)
def test_what_would_tear_blocks_apart_gives_a_plain_copy(operation, name):
    q = made(name, 256, 192)
    assert type(operation(q)) is torch.Tensor
    assert torch.equal(operation(q), operation(q.dequantize()))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        q.view(7, 5)


SPLITS = {
    "split": (lambda t: t.split(128), True),
    "chunk": (lambda t: t.chunk(3), True),
    "uneven": (lambda t: t.split([256, 128]), True),
    "rest": (lambda t: t.split([0, 256, 128]), True),
    "inside blocks": (lambda t: t.split(100), False),
    "along columns": (lambda t: t.split(128, dim=1), None),
}


@ALL
@pytest.mark.parametrize("how", SPLITS)
def test_parts_along_the_first_dimension_stay_quantized_where_no_block_is_cut(how, name):
    split, whole_blocks = SPLITS[how]
    q = made(name, 384, 192).detach()
    parts, expected = split(q), split(q.dequantize())
    assert len(parts) == len(expected)
    # Blocks of one row are cut by no boundary, those of a column or a square are where it lies inside.
    keeps = whole_blocks or (whole_blocks is False and name not in SQUARE)
    column = whole_blocks and q.quantized_storage.columnwise_order == "same"
    for part, values in zip(parts, expected, strict=True):
        assert type(part) is (type(q) if keeps else torch.Tensor)
        assert torch.equal(part.dequantize() if keeps else part, values)
        if keeps:
            assert (part._columnwise_data is not None) == column
            with pytest.raises(StateError, match="without a quantizer"):
                part.add_(1)


@ALL
def test_a_part_shares_the_codes_and_multiplies_as_the_whole_does(name):
    q, other = made(name, 256, 128).detach(), made(name, 64, 128).detach()
    parts = q.split(128)
    assert parts[1]._rowwise_data.data_ptr() == q._rowwise_data.data_ptr() + 128 * 128

    def product(left: te.QuantizedTensor) -> torch.Tensor:
        return te_hal.ops.gemm(left.quantized_storage, other.quantized_storage, out_dtype=torch.float32)

    assert torch.allclose(torch.cat(list(map(product, parts))), product(q), rtol=1e-5, atol=1e-5)


def test_parts_of_a_per_tensor_one_share_codes_and_scale():
    x = torch.randn(6, 4, requires_grad=True)
    q = te.Float8CurrentScalingQuantizer(E4M3)(x)
    first, second = q.split([2, 4])
    assert type(second) is te.Float8Tensor
    assert second._data.data_ptr() == q._data.data_ptr() + 8
    assert second._transpose is None
    assert second._scale_inv is q._scale_inv
    (second * 3).sum().backward()
    assert x.grad.sum(1).tolist() == [0.0, 0.0, *[12.0] * 4]
    assert first.shape == (2, 4)


@ALL
def test_writing_in_place_dequantizes_computes_and_quantizes_back(name):
    q = made(name, 96, 192)
    expected = QUANTIZERS[name]()(q.dequantize() * 3)
    assert q.mul_(3) is q
    assert same_bytes(q, expected)
    q[0] = 5.0
    assert ((q.dequantize()[0] - 5).abs() <= 5 / 16).all()


@ALL
def test_a_copy_takes_bytes_from_its_kind_and_quantizes_anything_else(name):
    q, other = made(name, 96, 192), QUANTIZERS[name]()(torch.randn(96, 192, dtype=torch.bfloat16))
    q.copy_(other)
    assert same_bytes(q, other)
    plain = torch.randn(96, 192, dtype=torch.bfloat16)
    q.copy_(plain)
    assert same_bytes(q, QUANTIZERS[name]()(plain))
    plain.copy_(other)
    assert torch.equal(plain, other.dequantize())


@ALL
def test_an_optimizer_trains_it(name):
    parameter = torch.nn.Parameter(made(name, 96, 192))
    before = parameter.dequantize().detach()
    parameter.grad = torch.ones(96, 192, dtype=torch.bfloat16)
    torch.optim.SGD([parameter], lr=0.5).step()
    assert same_bytes(parameter.data, QUANTIZERS[name]()(before - 0.5))


def through_file(q: te.QuantizedTensor) -> te.QuantizedTensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    with torch.serialization.safe_globals([rebuild_quantized_tensor]):
        return torch.load(file, weights_only=True)


REMAKES = {"deepcopy": copy.deepcopy, "pickle": lambda q: pickle.loads(pickle.dumps(q)), "torch.save": through_file}


@ALL
@pytest.mark.parametrize("remake", REMAKES)
@pytest.mark.parametrize("usages", [{}, {"columnwise": False}, {"rowwise": False}], ids=str)
def test_a_copy_has_the_same_bytes_and_shares_none(usages, remake, name):
    q = made(name, 96, 192, **usages).detach().requires_grad_()
    found = REMAKES[remake](q)
    assert type(found) is type(q)
    assert (found.dtype, found.requires_grad) == (torch.bfloat16, True)
    assert same_bytes(q.detach(), found.detach())
    shared = {t.data_ptr() for t in q.quantized_storage.tensors() if t is not None}
    assert not shared & {t.data_ptr() for t in found.quantized_storage.tensors() if t is not None}


@ALL
def test_a_loaded_tensor_has_no_quantizer_and_says_so(name):
    with pytest.raises(StateError, match=f"{type(made(name, 2, 2)).__name__}.*without a quantizer"):
        through_file(made(name, 96, 192)).add_(1)


# Usages


@ALL
def test_a_copy_can_be_dropped_but_not_the_last_one(name):
    q = made(name, 96, 192)
    values = q.dequantize()
    q.update_usage(columnwise_usage=False)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    assert q._columnwise_data is None
    assert torch.equal(q.dequantize(), values)
    with pytest.raises(ArgumentError, match="neither copy"):
        q.update_usage(rowwise_usage=False)


@ALL
@pytest.mark.parametrize("has", ["rowwise", "columnwise"])
def test_a_missing_copy_follows_from_the_other_only_where_blocks_are_square(has, name):
    q = made(name, 140, 260, rowwise=has == "rowwise", columnwise=has == "columnwise")
    if name in SQUARE:
        q.update_usage(True, True)
        assert same_bytes(q, made(name, 140, 260))
        return
    missing = "columnwise" if has == "rowwise" else "rowwise"
    with pytest.raises(UnsupportedError, match=f"a {missing} copy wanted from the {has} one"):
        q.update_usage(True, True)
    assert q.get_usages() == {"rowwise": has == "rowwise", "columnwise": has == "columnwise"}


def test_a_per_tensor_one_makes_either_copy():
    q = te.Float8CurrentScalingQuantizer(E4M3, columnwise=False)(torch.randn(4, 6))
    q.update_usage(columnwise_usage=True, rowwise_usage=False)
    assert q._data is None
    assert q._transpose.shape == (6, 4)
    with pytest.raises(ArgumentError, match="rowwise_usage"):
        q.update_usage(rowwise_usage=1)


@ALL
def test_a_columnwise_only_tensor_has_the_shape_of_what_it_stands_for(name):
    source = torch.randn(128, 256, dtype=torch.bfloat16)
    q = QUANTIZERS[name](rowwise=False)(source)
    assert (q.shape, q.size(0), q.numel()) == ((128, 256), 128, 128 * 256)
    assert q._rowwise_data is None
    assert q._rowwise_scale_inv is None
    assert ((q.dequantize() - source).abs() <= source.abs() / 16 + 2e-3).all()


@ALL
def test_printing_shows_the_values_and_the_kind(name):
    q = made(name, 3, 140)
    shown = repr(q)
    assert shown.startswith(f"{type(q).__name__}(tensor(")
    assert repr(q.quantized_storage.kind) in shown
    assert repr(q.dequantize()).split(",")[0].rpartition("[")[2].strip() in shown
