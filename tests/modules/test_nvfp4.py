"""Modules under NVFP4BlockScaling."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

import te_hal.modules as te
from te_hal import ops
from te_hal.quantization import quantizer_factories
from te_hal.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
from te_hal.schema.errors import ArgumentError, StateError, UnsupportedError
from te_hal.schema.formats import E2M1

BF16 = torch.bfloat16
MODULES = {
    "Linear": lambda: te.Linear(64, 128, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 128, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128, params_dtype=BF16),
    "TransformerLayer": lambda: te.TransformerLayer(
        64, 128, 4, self_attn_mask_type="causal", hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16
    ),
}
PLAIN = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
RECIPES = {
    "all": {},
    "none": PLAIN,
    "nearest": {"disable_stochastic_rounding": True},
    "no transform": {"disable_rht": True},
}


def step(module: torch.nn.Module, recipe: object, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Output and gradients of one step, with the same numbers each time."""
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(16, 2, 64, generator=generator) * scale).to(BF16).requires_grad_()
    module.zero_grad()
    torch.manual_seed(7)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=generator).to(BF16))
    grads = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "gx": x.grad, **grads}


@pytest.mark.parametrize("settings", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_step_stays_near_the_unquantized_one_and_is_not_it(name: str, settings: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    plain, found = step(module, None), step(module, NVFP4BlockScaling(**RECIPES[settings]))
    for key in ("y", "gx"):
        assert 1e-3 < relative_error(found[key], plain[key].double()) < 0.4, key
    weights = [key for key in plain if key.endswith("weight") and plain[key].dim() == 2]
    assert weights
    for key in weights:
        assert 1e-2 < relative_error(found[key], plain[key].double()) < 0.5, key


def test_a_linear_layer_is_the_products_of_its_operands() -> None:
    """Forward, dgrad and wgrad from the ops, with the seeds that the generator gives."""
    torch.manual_seed(0)
    module, recipe = te.Linear(64, 128, bias=False, params_dtype=BF16), NVFP4BlockScaling()
    found = step(module, recipe)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 2, 64, generator=generator).to(BF16).view(32, 64)
    gradient = torch.randn(16, 2, 128, generator=generator).to(BF16).view(32, 128)
    torch.manual_seed(7)
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64))

    def cast(tensor: torch.Tensor, mode: str, **flags: object) -> object:
        return ops.quantize(tensor, dtype=E2M1.dtype, mode=mode, columnwise=True, **flags)  # type: ignore[arg-type]

    inputs, weights = cast(x, "nvfp4_hadamard"), cast(module.weight.detach(), "nvfp4_16x16")
    gradients = cast(gradient, "nvfp4_hadamard", rounding_seed=seed)
    assert torch.equal(found["y"].view(32, 128), ops.gemm(inputs, weights))
    assert torch.equal(found["gx"].view(32, 64), ops.gemm(gradients, weights, layout="dgrad"))
    assert torch.equal(found["weight"], ops.gemm(gradients, inputs, layout="wgrad"))


def test_a_seed_repeats_a_step_to_the_bit() -> None:
    torch.manual_seed(0)
    module = MODULES["LayerNormMLP"]()
    first, second = step(module, NVFP4BlockScaling()), step(module, NVFP4BlockScaling())
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", MODULES)
def test_zeros_give_finite_values(name: str) -> None:
    """Case B04."""
    module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(value.isfinite().all() for value in step(module, NVFP4BlockScaling(), scale=0.0).values())


def test_a_factory_by_role_is_the_recipe() -> None:
    torch.manual_seed(0)
    module = MODULES["Linear"]()
    built_in = step(module, NVFP4BlockScaling())
    by_factory = step(module, CustomRecipe(qfactory=quantizer_factories.nvfp4_factory))
    assert all(torch.equal(built_in[key], by_factory[key]) for key in built_in)


def test_the_recipe_can_change_in_mid_training() -> None:
    """Case B33: what ran before does not show."""
    torch.manual_seed(0)
    module = MODULES["Linear"]()
    expected = step(module, NVFP4BlockScaling())
    step(module, MXFP8BlockScaling())
    recipe = NVFP4BlockScaling(**PLAIN)
    step(module, recipe)
    for name in PLAIN:
        setattr(recipe, name, False)
    found = step(module, recipe)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_weights_that_live_in_fp4_take_at_most_0_6_bytes_an_element() -> None:
    torch.manual_seed(0)
    plain = te.Linear(256, 512, bias=False, params_dtype=BF16)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=NVFP4BlockScaling()):
        module = te.Linear(256, 512, bias=False, params_dtype=BF16)
    held = [t for t in module.weight.quantized_storage.tensors() if t is not None]
    assert sum(t.nbytes for t in held) <= 0.6 * 256 * 512
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    with te.autocast(recipe=NVFP4BlockScaling()):
        assert torch.equal(module(x), plain(x))
    with te.autocast(recipe=MXFP8BlockScaling()), pytest.raises(StateError, match="recipe mismatch"):
        module(x)


def test_sizes_are_multiples_of_16_and_tensors_bf16_for_the_transform() -> None:
    module = te.Linear(64, 128, params_dtype=BF16)
    with te.autocast(recipe=NVFP4BlockScaling()), pytest.raises(ArgumentError, match="24, must be divisible by 16"):
        module(torch.randn(24, 64, dtype=BF16))
    module = te.Linear(64, 128)
    x = torch.randn(32, 64)
    with te.autocast(recipe=NVFP4BlockScaling()), pytest.raises(UnsupportedError, match=r"takes torch\.bfloat16"):
        module(x)
    with te.autocast(recipe=NVFP4BlockScaling(disable_rht=True)):
        assert module(x).isfinite().all()


def test_the_recipe_is_available_here_and_keeps_no_state() -> None:
    assert te.is_nvfp4_available(return_reason=True) == (True, "")
    module = MODULES["Linear"]()
    step(module, NVFP4BlockScaling())
    assert module.state_dict()["_extra_state"].numel() == 0
