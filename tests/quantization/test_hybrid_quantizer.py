"""HybridQuantizer: two quantizers for one tensor, in modules and as a tensor of its own."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from custom_recipes import BF16, E4M3, E5M2, by_role, equal, made, steps

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError

CHILDREN = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mxfp8": lambda: te.MXFP8Quantizer(E5M2),
    "nvfp4": te.NVFP4Quantizer,
    "identity": te.IdentityQuantizer,
}
PAIRS = [("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("current", "1x128"), ("identity", "mxfp8"), ("1x128", "identity")]
EVERY = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


def hybrid(pair: tuple[str, str], **settings: str) -> te.HybridQuantizer:
    return te.HybridQuantizer(
        rowwise_quantizer=CHILDREN[pair[0]](), columnwise_quantizer=CHILDREN[pair[1]](), **settings
    )


def data(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape or (32, 64), generator=torch.Generator().manual_seed(seed)).to(BF16)


def alone(name: str, x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """What one direction by itself stands for."""
    quantizer = CHILDREN[name]()
    quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
    result = quantizer(x)
    return result.dequantize() if isinstance(result, te.QuantizedTensor) else result


def parts(q: te.HybridQuantizedTensor) -> list[torch.Tensor]:
    return [
        part if isinstance(part, torch.Tensor) else te_hal.ops.dequantize(part)
        for part in (q._rowwise_storage, q._columnwise_storage)
        if part is not None
    ]


# In modules

#: A mixed factory, what its forward is and what its backward is.
MIXED = {
    "high precision, mxfp8": (factories.high_precision_fwd_mxfp8_bwd_factory, None, recipe.MXFP8BlockScaling),
    "mxfp8, nvfp4": (factories.mxfp8_fwd_nvfp4_bwd_factory, recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling),
    "mxfp8, high precision": (factories.mxfp8_fwd_high_precision_bwd_factory, recipe.MXFP8BlockScaling, None),
}


@pytest.mark.parametrize("layer", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_factory_has_the_forward_of_one_recipe_and_the_gradients_of_the_other(name, layer):
    factory, forward, backward = MIXED[name]

    def run(chosen: recipe.Recipe | None) -> list[torch.Tensor]:
        torch.manual_seed(5)  # of stochastic rounding
        return steps(module, chosen)

    module = made(layer)
    found = run(recipe.CustomRecipe(qfactory=factory))
    assert torch.equal(found[0], run(forward and forward())[0])
    assert equal(found[1:], run(backward and backward())[1:])


@pytest.mark.parametrize("name", MIXED)
def test_a_mlp_trains_under_a_mixed_factory(name):
    module = made("LayerNormMLP")
    found = steps(module, recipe.CustomRecipe(qfactory=MIXED[name][0]))
    plain = steps(module, None)
    assert not torch.equal(found[1], plain[1])
    for result, exact in zip(found, plain, strict=True):
        # E2M1 in two products one after the other costs 0.2 each.
        assert (result.double() - exact.double()).norm() <= 0.45 * exact.double().norm()


def test_a_grouped_layer_is_its_groups_one_by_one_under_a_mixed_factory():
    chosen = recipe.CustomRecipe(qfactory=factories.high_precision_fwd_mxfp8_bwd_factory)
    torch.manual_seed(0)
    grouped = te.GroupedLinear(2, 64, 96, params_dtype=BF16)
    x, gy = data(96, 64), data(96, 96, seed=4)
    with te.autocast(recipe=chosen):
        grouped(x, [32, 64]).backward(gy)
    for number, rows in enumerate((slice(0, 32), slice(32, 96))):
        single = te.Linear(64, 96, params_dtype=BF16)
        single.weight.data.copy_(grouped.get_parameter(f"weight{number}"))
        with te.autocast(recipe=chosen):
            single(x[rows]).backward(gy[rows])
        assert torch.equal(grouped.get_parameter(f"weight{number}").grad, single.weight.grad)


def test_a_gradient_has_a_format_for_each_product():
    chosen = recipe.CustomRecipe(
        qfactory=by_role(
            input=lambda: hybrid(("identity", "nvfp4")),
            weight=lambda: hybrid(("identity", "mxfp8")),
            grad_output=lambda: hybrid(("mxfp8", "nvfp4")),
        )
    )
    module = te.Linear(64, 96, bias=False, params_dtype=BF16)
    x, gy = data().requires_grad_(), data(32, 96, seed=4)
    with te.autocast(recipe=chosen):
        module(x).backward(gy)
    by_rows, by_columns = (alone("mxfp8", gy, rowwise=True), alone("nvfp4", gy, rowwise=False))
    weight = alone("mxfp8", module.weight.detach(), rowwise=False)
    assert torch.allclose(x.grad.double(), by_rows.double() @ weight.double(), rtol=5e-3, atol=2e-3)
    exact = by_columns.double().T @ alone("nvfp4", x.detach(), rowwise=False).double()
    # decoding to bf16 rounds what products take exactly: 0.4% an operand
    assert (module.weight.grad.double() - exact).norm() <= 1e-2 * exact.norm()


def test_the_second_part_may_be_made_of_what_the_first_one_stands_for():
    x = data()
    chained = hybrid(("nvfp4", "mxfp8"), columnwise_source="rowwise_dequantized")
    assert torch.equal(parts(chained(x))[1], alone("mxfp8", alone("nvfp4", x, rowwise=True), rowwise=False))
    assert not torch.equal(parts(chained(x))[1], parts(hybrid(("nvfp4", "mxfp8"))(x))[1])
    module = te.Linear(64, 96, bias=False, params_dtype=BF16)
    gy = data(32, 96, seed=4)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=by_role(input=chained.copy))):
        module(x).backward(gy)
    exact = gy.double().T @ parts(chained(x))[1].double()
    assert (module.weight.grad.double() - exact).norm() <= 4e-3 * exact.norm()


def test_an_input_that_is_kept_unquantized_gives_the_same_bytes():
    chosen = recipe.CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd_factory)
    results = []
    for keeps in (False, True):
        torch.manual_seed(0)
        module = te.Linear(160, 96, params_dtype=BF16, save_original_input=keeps)
        torch.manual_seed(5)
        results.append(steps(module, chosen))
    assert equal(*results)


@pytest.mark.parametrize("first", [True, False])
def test_microbatches_give_the_same_bytes(first):
    chosen, module = recipe.CustomRecipe(qfactory=factories.high_precision_fwd_mxfp8_bwd_factory), made("Linear")
    x = data(64, 160).requires_grad_()
    results = []
    for flag in (None, first):
        module.zero_grad()
        with te.autocast(recipe=chosen):
            y = module(x, is_first_microbatch=flag)
        x.grad = None
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, module.weight.grad])
    assert equal(*results)


def test_a_quantized_result_is_made_by_the_rowwise_quantizer():
    module = te.Linear(64, 64)
    module.output_quantizer_role = te.QuantizerRole("linear", "output")
    chosen = recipe.CustomRecipe(qfactory=by_role(output=lambda: hybrid(("current", "mxfp8"))))
    with te.autocast(recipe=chosen):
        y = module(torch.randn(32, 64), fp8_output=True)
    assert isinstance(y, te.Float8Tensor)


def test_explain_names_both_quantizers():
    module = made("Linear")
    chosen = recipe.CustomRecipe(qfactory=factories.mxfp8_fwd_nvfp4_bwd_factory)
    steps(module, chosen)
    text = str(te_hal.explain(module))
    assert "two quantizers: E4M3/mxfp8 made rowwise, then E2M1/nvfp4" in text


def test_a_shape_that_one_of_the_two_cannot_take_is_refused():
    module = te.Linear(48, 96)
    chosen = recipe.CustomRecipe(qfactory=factories.mxfp8_fwd_high_precision_bwd_factory)
    with pytest.raises(ArgumentError, match="divisible by 32"), te.autocast(recipe=chosen):
        module(torch.randn(32, 48))


@pytest.mark.parametrize("name", ["nvfp4_row_scaled_fwd_mxfp8_bwd", "nvfp4_row_scaled_fwd_high_precision_bwd"])
def test_a_factory_with_scales_per_row_is_refused_by_name(name):
    chosen = recipe.CustomRecipe(qfactory=getattr(factories, f"{name}_factory"))
    with pytest.raises(UnsupportedError, match=name):
        steps(made("Linear"), chosen)


def test_fp8_attention_is_refused_by_the_factory_that_names_it():
    factory = factories.nvfp4_linear_fp8_dpa_factory
    assert isinstance(factory(te.QuantizerRole("linear", "input")), te.NVFP4Quantizer)
    with pytest.raises(UnsupportedError, match="no backend has FP8 attention"):
        factory(te.QuantizerRole("dpa", "qkv"))


def test_weights_by_neighbours_are_those_of_the_recipe_without_squares():
    chosen = recipe.CustomRecipe(qfactory=factories.nvfp4_1d_weight_factory)
    results = []
    for each in (chosen, recipe.NVFP4BlockScaling(disable_2d_quantization=True)):
        torch.manual_seed(5)
        results.append(steps(made("Linear"), each))
    assert equal(*results)


# As a tensor


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
    assert (q.float().dtype, type(q.float())) == (torch.float32, te.HybridQuantizedTensor)
    assert torch.equal(q.float().dequantize().to(BF16), q.dequantize())


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
