"""HybridQuantizer and its tensors: two quantizers for one tensor. In modules: tests/modules/test_mixed_factories.py."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from custom_recipes import BF16, E4M3, equal
from hybrids import alone, data, hybrid, parts

import te_hal.modules as te
import te_hal.ops
from te_hal import recipe
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError

PAIRS = [("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("current", "1x128"), ("identity", "mxfp8"), ("1x128", "identity")]
EVERY = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


@EVERY
def test_each_part_is_the_copy_of_its_own_quantizer(pair):
    x = data()
    q = hybrid(pair)(x)
    assert isinstance(q, te.HybridQuantizedTensor)
    assert (q.shape, q.dtype, q.get_usages()) == (x.shape, x.dtype, {"rowwise": True, "columnwise": True})
    wanted = [alone(pair[0], x, rowwise=True), alone(pair[1], x, rowwise=False)]
    assert equal(parts(q), wanted)
    assert torch.equal(q.dequantize(), wanted[0])
    assert torch.equal(q + 1, wanted[0] + 1)
    q.update_usage(rowwise_usage=False)
    assert torch.equal(q.dequantize(), wanted[1])


@EVERY
def test_a_part_in_high_precision_is_a_copy(pair):
    x = data()
    q, before = hybrid(pair)(x), x.clone()
    x.zero_()
    assert equal(parts(q), parts(hybrid(pair)(before)))


def through_a_file(q: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([rebuild_quantized_tensor, rebuild_hybrid_tensor]):
        return torch.load(buffer, weights_only=True)


REMAKES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": through_a_file,
    "cpu": lambda q: q.to("cpu", copy=True),
}


@pytest.mark.parametrize("remake", REMAKES)
@EVERY
def test_a_copy_has_the_same_parts_and_shares_none(pair, remake):
    q = hybrid(pair)(data())
    again = REMAKES[remake](q.detach())
    assert isinstance(again, te.HybridQuantizedTensor)
    assert equal(parts(again), parts(q))
    places = [{t.data_ptr() for t in each.quantized_storage.tensors() if t is not None} for each in (q, again)]
    assert not places[0] & places[1]


@EVERY
def test_another_nominal_dtype_keeps_the_parts(pair):
    q = hybrid(pair)(data())
    wide = q.to(torch.float32)
    assert (wide.dtype, type(wide)) == (torch.float32, te.HybridQuantizedTensor)
    assert torch.equal(wide.dequantize().to(BF16), q.dequantize())


@EVERY
def test_writing_in_place_quantizes_both_parts_again(pair):
    x, other = data(), data(seed=8)
    q = hybrid(pair)(x)
    q.copy_(other)
    assert equal(parts(q), parts(hybrid(pair)(other)))
    q.mul_(2)
    assert torch.equal(q.dequantize(), alone(pair[0], alone(pair[0], other, rowwise=True) * 2, rowwise=True))
    same = hybrid(pair)(x)
    same.copy_(q)
    assert equal(parts(same), parts(q))


@EVERY
def test_an_empty_one_is_filled_in_place(pair):
    quantizer = hybrid(pair)
    q = quantizer.make_empty((32, 64), dtype=BF16)
    quantizer.update_quantized(data(), q)
    assert equal(parts(q), parts(quantizer(data())))


def test_the_gradient_passes_straight_through():
    x = data().requires_grad_()
    (hybrid(("mxfp8", "nvfp4"))(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_a_module_takes_one_as_its_input_by_its_values():
    module, q = te.Linear(64, 96, params_dtype=BF16), hybrid(("mxfp8", "nvfp4"))(data())
    assert torch.equal(module(q), module(q.dequantize()))


def test_the_report_of_memory_counts_both_parts():
    holder = torch.nn.Module()
    q = hybrid(("mxfp8", "identity"))(data(128, 128))
    holder.weight = torch.nn.Parameter(q.detach(), requires_grad=False)
    assert te.memory_report(holder).nbytes == 128 * 128 * (1 + 2) + 128 * 4


BAD = {
    "a request": ({"rowwise_quantizer": te.DelayedScalingRequest()}, ArgumentTypeError, "DelayedScalingRequest"),
    "a hybrid": ({"columnwise_quantizer": hybrid(("mxfp8", "nvfp4"))}, ArgumentTypeError, "HybridQuantizer"),
    "no quantizer": ({"columnwise_quantizer": None}, ArgumentTypeError, "columnwise_quantizer: got a NoneType"),
    "a source": ({"columnwise_source": "columns"}, ArgumentError, "columnwise_source"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_the_arguments_name(case):
    given, error, words = BAD[case]
    usual = {"rowwise_quantizer": te.NVFP4Quantizer(), "columnwise_quantizer": te.NVFP4Quantizer()}
    with pytest.raises(error, match=words):
        te.HybridQuantizer(**{**usual, **given})


def test_one_object_for_both_is_refused():
    one = te.NVFP4Quantizer()
    with pytest.raises(ArgumentError, match="the object that is rowwise_quantizer too"):
        te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=one)


def test_what_does_not_fit_is_refused_and_nothing_is_written():
    x = data()
    q, float8 = hybrid(("mxfp8", "nvfp4"))(x), te.Float8CurrentScalingQuantizer(E4M3)(x)
    before = [part.clone() for part in parts(q)]
    with pytest.raises(ArgumentTypeError, match="out: got a HybridStorage"):
        te.Float8CurrentScalingQuantizer(E4M3).quantize(data(seed=8), out=q)
    with pytest.raises(ArgumentError, match="HybridQuantizer: out: got E4M3/tensor"):
        hybrid(("mxfp8", "nvfp4")).quantize(x, out=float8)
    for other in (("nvfp4", "mxfp8"), ("mxfp8", "1x128"), ("identity", "nvfp4"), ("mxfp8", "identity")):
        with pytest.raises(ArgumentError, match="HybridQuantizer: out: got hybrid"):
            hybrid(other).quantize(data(seed=8), out=q)
    with pytest.raises(ArgumentError, match="with the parts that are asked for"):
        hybrid(("mxfp8", "nvfp4")).quantize_storage(data(seed=8), rowwise=True, out=q.quantized_storage)
    with pytest.raises(ArgumentError, match="HybridQuantizer: out"):
        hybrid(("identity", "mxfp8")).quantize(data(seed=8), out=hybrid(("mxfp8", "identity"))(x))
    with pytest.raises(ArgumentError, match=r"of shape \(64, 64\)"):
        hybrid(("mxfp8", "nvfp4")).quantize(data(64, 64), out=q)
    with pytest.raises(ArgumentTypeError, match="dequantize: input: got a HybridStorage"):
        te_hal.ops.dequantize(q.quantized_storage)
    assert equal(parts(q), before)


def test_a_weight_of_two_parts_runs_by_its_values_and_is_refused_under_a_recipe_of_one():
    module = te.Linear(64, 64, params_dtype=BF16)
    module.weight = torch.nn.Parameter(hybrid(("mxfp8", "nvfp4"))(module.weight.detach()))
    with pytest.warns(UserWarning, match="dequantized at each forward"):
        found = module(data())
    assert torch.equal(found, torch.nn.functional.linear(data(), module.weight.dequantize(), module.bias))
    with (
        pytest.raises(StateError, match=r"Linear: weight: got hybrid\(E4M3|Linear: weight: got hybrid\(E5M2"),
        te.autocast(recipe=recipe.Float8CurrentScaling()),
    ):
        module(data())


def test_the_quantizers_that_were_handed_over_are_left_as_they_were():
    one = te.MXFP8Quantizer(E4M3)
    quantizer = te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=te.NVFP4Quantizer())
    assert one.get_usages() == {"rowwise": True, "columnwise": True}
    assert quantizer.copy().rowwise_quantizer is not quantizer.rowwise_quantizer


def test_a_part_that_is_gone_cannot_be_asked_for():
    q = hybrid(("mxfp8", "nvfp4"))(data())
    q.update_usage(columnwise_usage=False)
    with pytest.raises(UnsupportedError, match="columnwise_usage"):
        q.update_usage(columnwise_usage=True)
    with pytest.raises(ArgumentError, match="no part"):
        q.update_usage(rowwise_usage=False)
    with pytest.raises(StateError, match="fused_arguments"):
        hybrid(("mxfp8", "nvfp4")).fused_arguments(rowwise=True, columnwise=True)
