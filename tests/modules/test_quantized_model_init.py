"""quantized_model_init: its blocks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from quantized_layers import RECIPES, quantized, run

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError


def test_blocks_nest_and_end():
    with te.quantized_model_init(recipe=RECIPES["current"]()):
        with te.quantized_model_init(enabled=False):
            inner = te.Linear(32, 32)
        outer = te.Linear(32, 32)
        norm = te.LayerNorm(32)
    after = te.Linear(32, 32)
    assert isinstance(outer.weight, te.Float8Tensor)
    others = (inner.weight, after.weight, outer.bias, norm.weight)
    assert not any(isinstance(parameter, te.Float8Tensor) for parameter in others)
    with te.fp8_model_init(recipe=RECIPES["current"]()):
        assert isinstance(te.Linear(32, 32).weight, te.Float8Tensor)


def test_an_exception_ends_the_block():
    with pytest.raises(RuntimeError, match="stop"), te.quantized_model_init():
        raise RuntimeError("stop")
    assert not isinstance(te.Linear(32, 32).weight, te.Float8Tensor)


def test_an_autocast_of_another_family_is_refused_before_anything_changes():
    module = quantized("current")
    with pytest.raises(StateError, match=r"Linear: recipe mismatch: got autocast under DelayedScaling"):
        run(module, "delayed")
    assert module.fp8_meta["recipe"].family == "float8_current_scaling"
    run(module, "current")


def test_a_recipe_of_the_family_with_other_blocks_is_refused():
    module, x = quantized("block"), torch.randn(32, 32).bfloat16()
    other = recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    with pytest.raises(StateError, match=r"Linear: weight: got E4M3/block_128x128"), te.autocast(recipe=other):
        module(x)
    run(module, "block")


REFUSED = {
    "splits": (lambda: quantized(parameters_split=("a", "b")), ArgumentError, "parameters_split"),
    "sizes": (lambda: te_linear(40, 33), ArgumentError, "weight"),
    "a flag": (lambda: te.quantized_model_init(enabled=1), ArgumentTypeError, "enabled"),
    "preserve": (
        lambda: te.quantized_model_init(preserve_high_precision_init_val="no"),
        ArgumentTypeError,
        "preserve_high_precision_init_val",
    ),
    "a recipe": (lambda: te.quantized_model_init(recipe="delayed"), ArgumentTypeError, "recipe"),
}


def te_linear(in_features: int, out_features: int) -> te.Linear:
    with te.quantized_model_init():
        return te.Linear(in_features, out_features)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        make()


def test_one_object_is_not_entered_twice():
    block = te.quantized_model_init()
    with block, pytest.raises(StateError, match="already entered"), block:
        pass
    with block:
        pass
