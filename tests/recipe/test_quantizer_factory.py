"""CustomRecipe.qfactory_key: what says that two factories are one policy."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories
from te_hal.recipe import CustomRecipe, DelayedScaling, quantizer_factory

FACTORIES = [name for name in vars(quantizer_factories) if name.endswith("_factory") and name != "quantizer_factory"]
X = torch.randn(32, 64)


def policy(asked, key=None):
    """A factory that is another object each time, and changes inside with every question."""

    def factory(role):
        asked.append(role)
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")

    return factory if key is None else quantizer_factory(key=key)(factory)


def run(module, of):
    with te.autocast(recipe=of):
        module(X)


@pytest.mark.parametrize("name", FACTORIES)
def test_ready_factories_have_a_key_of_name_and_version(name):
    factory = getattr(quantizer_factories, name)
    assert CustomRecipe(qfactory=factory).qfactory_key == factory.qfactory_key == (f"te_hal.{name}", 1)


def test_the_decorator_hands_the_factory_back_and_does_not_call_it():
    asked = []
    factory = policy(asked)
    assert recipe.quantizer_factory(key=("mine", 2))(factory) is factory
    assert (factory.qfactory_key, asked) == (("mine", 2), [])


def test_the_recipes_own_key_goes_before_that_of_the_factory():
    given = CustomRecipe(qfactory=policy([], "mine"), qfactory_key="other")
    assert given.qfactory_key == "other"
    given.qfactory = policy([], "third")
    assert given.qfactory_key == "third"
    given.qfactory = policy([])
    assert given.qfactory_key is None


TAKES_A_KEY = {
    "decorator": lambda key: quantizer_factory(key=key),
    "recipe": lambda key: CustomRecipe(qfactory=policy([]), qfactory_key=key),
}


NO_KEYS = {"a list": ["mine"], "a tensor": torch.ones(3), "one number": torch.ones(()), "NaN": float("nan")}


@pytest.mark.parametrize("key", NO_KEYS)
@pytest.mark.parametrize("where", TAKES_A_KEY)
def test_a_key_that_cannot_be_hashed_or_is_not_equal_to_itself_is_refused(where, key):
    for given in (NO_KEYS[key], ("mine", (NO_KEYS[key],))):
        with pytest.raises(TypeError, match="must be hashable"):
            TAKES_A_KEY[where](given)


@pytest.mark.parametrize("key", [None, ("mine", 1)], ids=["without", "with"])
def test_recipes_are_equal_by_key_or_else_by_factory(key):
    one, other = CustomRecipe(qfactory=policy([], key)), CustomRecipe(qfactory=policy([], key))
    assert (one == other) is (key is not None)
    assert one != CustomRecipe(qfactory=policy([], key), quantization_alignment=16)
    assert one != DelayedScaling()


def test_a_module_asks_again_only_where_the_key_changes():
    module, asked = te.Linear(64, 64), []
    run(module, CustomRecipe(qfactory=policy(asked, ("mine", 1))))
    first = module.quantizers["scaling_fwd"]
    run(module, CustomRecipe(qfactory=policy(asked, ("mine", 1))))
    assert (len(asked), module.quantizers["scaling_fwd"] is first) == (5, True)
    run(module, CustomRecipe(qfactory=policy(asked, ("mine", 2))))
    assert len(asked) == 10


NAMES = {
    "self": ({}, {"linear_qkv", "proj"}),
    "self with norm": ({"input_layernorm": True}, {"layernorm_linear_qkv", "proj"}),
    "cross": ({"attention_type": "cross"}, {"linear_q", "linear_kv", "proj"}),
    "cross with norm": (
        {"attention_type": "cross", "input_layernorm": True},
        {"layernorm_linear_q", "linear_kv", "proj"},
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_projections_have_transformer_engines_names(case):
    arguments, names = NAMES[case]
    asked = []
    module = te.MultiheadAttention(64, 4, name="attention", **arguments)
    x = torch.randn(16, 2, 64)
    with te.autocast(recipe=CustomRecipe(qfactory=policy(asked))):
        module(x, encoder_output=x if "cross" in case else None)
    assert {role.name for role in asked if role is not None} == {f"attention.{name}" for name in names}


def test_scales_and_histories_of_requests_are_those_of_their_slots():
    module = te.Linear(64, 64)
    run(module, CustomRecipe(qfactory=quantizer_factories.delayed_scaling_factory))
    state = module.fp8_meta["scaling_fwd"]
    assert (state.scale.shape, state.amax_history.shape) == ((3,), (1024, 3))
    run(module, CustomRecipe(qfactory=quantizer_factories.mxfp8_factory))
    with pytest.raises(AttributeError, match="no slot of this CustomRecipe has delayed scaling"):
        module.fp8_meta["scaling_fwd"].scale  # noqa: B018 - read for the error
