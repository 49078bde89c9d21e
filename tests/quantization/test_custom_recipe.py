"""CustomRecipe: what its factory is asked, and what it may answer."""

from __future__ import annotations

import pytest
import torch
from custom_recipes import BF16, E4M3, MIXED, MODULES, READY, Thousandths, by_role, equal, made, steps

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories

# What the factory is asked


def asked_about(module: torch.nn.Module, **roles: te.QuantizerRole) -> list[str]:
    asked: list[te.QuantizerRole | None] = []
    for name, role in roles.items():
        setattr(module, name, role)

    def factory(role: te.QuantizerRole | None) -> te.Quantizer:
        asked.append(role)
        return te.IdentityQuantizer()

    chosen = recipe.CustomRecipe(qfactory=factory)
    steps(module, chosen, 3)
    return [str(role) for role in asked]


def test_each_slot_is_asked_about_once_forward_before_backward():
    kind = "module_type=linear|tensor_type="
    assert asked_about(made("Linear")) == [f"{kind}input", f"{kind}weight", "None", f"{kind}grad_output", "None"]
    assert asked_about(made("LayerNormLinear", label="qkv")) == [
        f"{kind}input|name=qkv",
        f"{kind}weight|name=qkv",
        "None",
        f"{kind}grad_output|name=qkv",
        "None",
    ]


def test_the_products_of_a_mlp_have_names_and_what_lies_between_them_the_consumers_role():
    found = asked_about(made("LayerNormMLP", label="mlp"))
    one, two = ("module_type=linear|tensor_type={}|name=mlp." + gemm for gemm in ("fc1", "fc2"))
    forward = [one.format("input"), one.format("weight"), two.format("input")]
    forward += [two.format("input"), two.format("weight"), "None"]
    backward = [one.format("grad_output"), "None", two.format("grad_output"), one.format("grad_output")]
    assert found == forward + backward


def test_a_consumers_role_is_asked_about_once_it_is_known():
    consumer = te.QuantizerRole("dpa", "qkv", "attention")
    module = made("Linear")
    assert asked_about(module, output_quantizer_role=consumer)[2] == str(consumer)
    assert asked_about(module, grad_input_quantizer_role=consumer)[4] == str(consumer)


def test_a_role_prints_what_it_knows_and_can_be_a_key():
    assert str(te.QuantizerRole()) == "QuantizerRole()"
    assert str(te.QuantizerRole(tensor_type="weight")) == "tensor_type=weight"
    assert {te.QuantizerRole("linear"): 1}[te.QuantizerRole("linear")] == 1


# What it may answer


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ready", READY)
def test_a_ready_factory_gives_the_bytes_of_its_recipe(ready, name):
    factory, kind = READY[ready]
    assert equal(steps(made(name), recipe.CustomRecipe(qfactory=factory), 4), steps(made(name), kind(), 4))


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
def test_nothing_is_quantized_where_every_role_stays_in_high_precision(name):
    chosen = recipe.CustomRecipe(qfactory=factories.high_precision_factory)
    assert equal(steps(made(name), chosen), steps(made(name), None))


def test_an_object_with_quantize_and_dequantize_is_a_quantizer():
    module, plain = made("Linear"), made("Linear")
    found = steps(module, recipe.CustomRecipe(qfactory=lambda _: Thousandths()))

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return ((tensor.float() * 1000).round() / 1000).to(BF16)

    generator = torch.Generator().manual_seed(0)
    x, gy = torch.randn(64, 160, generator=generator).to(BF16), torch.randn(64, 96, generator=generator).to(BF16)
    weight = plain.weight.detach()
    y = rounded(x).double() @ rounded(weight).double().T
    products = (y, rounded(gy).double() @ rounded(weight).double(), rounded(gy).double().T @ rounded(x).double())
    for result, exact in zip(found, products, strict=False):
        # One rounding to bf16, 2e-3 at most.
        assert (result.double() - exact).norm() <= 3e-3 * exact.norm()
    assert torch.equal(found[3], gy.float().sum(0).to(BF16))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mixed", MIXED)
def test_quantized_and_plain_operands_mix(mixed, name):
    module = made(name)
    reference = steps(made(name), None, 4)
    # Casts of E4M3 (0.03 in norm) and E5M2 (0.06), and what they do to the sums behind them.
    for result, exact in zip(steps(module, recipe.CustomRecipe(qfactory=MIXED[mixed]), 4), reference, strict=True):
        assert (result.double() - exact.double()).norm() <= 0.1 * exact.double().norm()
        assert result.isfinite().all()


def test_each_operand_has_the_format_that_its_role_was_given():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=MIXED["delayed and current"]))
    (plan,) = module._plans
    found = [str(of) for of in plan.key.formats.operands]
    assert found == ["E4M3/tensor/delayed", "E4M3/tensor", "None", "None", "None"]
    state = module.fp8_meta["scaling_fwd"]
    assert state.delayed.scale.shape == (1,)
    assert module.fp8_meta["scaling_bwd"].delayed is None


def test_one_quantizer_may_serve_several_roles():
    shared = te.Float8CurrentScalingQuantizer(E4M3)
    found = steps(made("Linear"), recipe.CustomRecipe(qfactory=lambda _: shared))
    assert equal(found, steps(made("Linear"), recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3)))
    assert shared.get_usages() == {"rowwise": True, "columnwise": True}


def test_a_quantized_result_is_made_by_the_output_role():
    module = made("Linear")
    module.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    chosen = recipe.CustomRecipe(qfactory=factories.mxfp8_factory)
    with te.autocast(recipe=chosen):
        assert type(module(torch.ones(64, 160, dtype=BF16), fp8_output=True)) is te.MXFP8Tensor
    module.output_quantizer_role = None
    plain = recipe.CustomRecipe(qfactory=by_role(input=lambda: te.Float8CurrentScalingQuantizer(E4M3)))
    with te.autocast(recipe=plain):
        assert type(module(torch.ones(64, 160, dtype=BF16), fp8_output=True)) is torch.Tensor


# IdentityQuantizer


def test_an_identity_that_rounds_does_so_to_what_products_take():
    module = te.Linear(160, 96)
    x = torch.randn(64, 160)
    chosen = recipe.CustomRecipe(qfactory=by_role(input=lambda: te.IdentityQuantizer(dtype=BF16)))
    with te.autocast(recipe=chosen):
        found = module(x)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factories.high_precision_factory)):
        assert torch.equal(found, module(x.bfloat16().float()))


class WritesInPlace:
    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(0.5)

    def dequantize(self, made: torch.Tensor) -> torch.Tensor:
        return made.add_(1)


def test_a_quantizer_that_writes_in_place_changes_neither_the_weight_nor_the_callers_tensors():
    module = te.Linear(160, 96)
    x, dy = torch.randn(64, 160), torch.randn(64, 96)
    before = [tensor.detach().clone() for tensor in (module.weight, x, dy)]
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=lambda _: WritesInPlace())):
        y = module(x.requires_grad_())
    y.backward(dy)
    after = [tensor.detach() for tensor in (module.weight, x, dy)]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    weight, values = (before[0] * 0.5 + 1).double(), (before[1] * 0.5 + 1).double()
    expected = torch.nn.functional.linear(values, weight, module.bias.double())
    assert (y.double() - expected).norm() <= 1e-5 * expected.norm()
