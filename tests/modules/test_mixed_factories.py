"""Modules whose tensors have a quantizer for each product that reads them, and the ready factories that mix recipes."""

from __future__ import annotations

import pytest
import torch
from custom_recipes import BF16, by_role, equal, made, steps
from hybrids import alone, data, hybrid, parts

import te_hal
import te_hal.modules as te
import te_hal.modules.ops as te_ops
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.schema.errors import ArgumentError, UnsupportedError

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


def fused_linear(bias: bool) -> torch.nn.Module:
    return te_ops.Sequential(te_ops.Linear(64, 96, bias=bias, dtype=BF16))


#: Layers by whether they have biases, and what they are called with besides the input.
BIASED = {
    "Linear": (lambda bias: te.Linear(64, 96, bias=bias, params_dtype=BF16), ()),
    "LayerNormLinear": (lambda bias: te.LayerNormLinear(64, 96, bias=bias, params_dtype=BF16), ()),
    "LayerNormMLP": (lambda bias: te.LayerNormMLP(64, 96, bias=bias, params_dtype=BF16), ()),
    "GroupedLinear": (lambda bias: te.GroupedLinear(1, 64, 96, bias=bias, params_dtype=BF16), ([64],)),
    "ops.Linear": (fused_linear, ()),
}


@pytest.mark.parametrize("pair", [("mxfp8", "current"), ("identity", "mxfp8")], ids="-".join)
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_beside_a_gradient_of_two_formats_changes_no_other_gradient(name, pair):
    layer, more = BIASED[name]
    chosen = recipe.CustomRecipe(qfactory=by_role(grad_output=lambda: hybrid(pair)))
    with_bias, without = layer(True), layer(False)
    for key, parameter in with_bias.named_parameters():
        if "bias" in key and "norm" not in key:
            parameter.data.zero_()  # so that no value depends on it
    without.load_state_dict(with_bias.state_dict(), strict=False)
    inputs, results = data(64, 64), []
    for module in (with_bias, without):
        x = inputs.clone().requires_grad_()
        with te.autocast(recipe=chosen):
            y = module(x, *more)
        gy = data(*y.shape, seed=4)
        y.backward(gy)
        results.append({"input": x.grad, **{key: each.grad for key, each in module.named_parameters()}})
    assert all(torch.equal(results[0].pop(key), gradient) for key, gradient in results[1].items())
    of_last = [results[0][key] for key in sorted(results[0])][-1]
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in results[0].values())
    assert torch.allclose(of_last.double(), gy.double().sum(0), rtol=2**-8, atol=0)


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
