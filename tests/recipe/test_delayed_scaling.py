"""DelayedScaling: fields, defaults, refusals, predicates, equality, copies, and what a wrong assignment leaves."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from te_hal import recipe
from te_hal.recipe import DelayedScaling, Format, Recipe
from te_hal.schema.errors import ArgumentError, TeHalError, UnsupportedError

DEFAULTS = {
    "margin": 0,
    "fp8_format": Format.HYBRID,
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "scaling_factor_compute_algo": None,
    "reduce_amax": True,
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
}

BAD = [
    ("margin", 1.0, "int from -100 to 100"),
    ("margin", True, "int"),
    ("margin", "1", "int"),
    ("margin", None, "int"),
    ("margin", 101, "-100 to 100"),
    ("margin", -101, "-100 to 100"),
    ("fp8_format", Format.E5M2, "gradients only"),
    ("fp8_format", Format.E2M1, "Format.HYBRID"),
    ("fp8_format", "HYBRID", "Format.HYBRID"),
    ("fp8_format", None, "Format.HYBRID"),
    ("amax_history_len", 0, "at least 1"),
    ("amax_history_len", -4, "at least 1"),
    ("amax_history_len", 16.0, "int"),
    ("amax_history_len", "16", "int"),
    ("amax_history_len", True, "int"),
    ("amax_compute_algo", "mean", "'most_recent'"),
    ("amax_compute_algo", None, "a callable"),
    ("scaling_factor_compute_algo", "max", "a callable"),
    ("scaling_factor_compute_algo", False, "a callable"),
    ("reduce_amax", 1, "bool"),
    ("reduce_amax", None, "bool"),
    ("fp8_dpa", None, "bool"),
    ("fp8_mha", 0, "bool"),
    ("backward_override", "high_precision", "Float8CurrentScaling"),
    ("backward_override", "", "None"),
]


def test_the_defaults_are_those_of_transformer_engine():
    made = DelayedScaling()
    assert {field.name: getattr(made, field.name) for field in dataclasses.fields(made)} == DEFAULTS


def test_fields_keep_their_order_for_positional_use():
    made = DelayedScaling(1, Format.E4M3, 16, "most_recent", None, False)
    assert (made.margin, made.fp8_format, made.amax_history_len) == (1, Format.E4M3, 16)
    assert (made.amax_compute_algo, made.reduce_amax) == ("most_recent", False)


@pytest.mark.parametrize(("name", "value", "accepted"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_a_bad_value_is_refused_in_construction_and_assignment(name, value, accepted):
    with pytest.raises(ArgumentError, match=f"DelayedScaling.{name}") as raised:
        DelayedScaling(**{name: value})
    assert accepted in raised.value.accepted + raised.value.todo
    made = DelayedScaling(amax_history_len=8)
    with pytest.raises(ValueError, match=f"DelayedScaling.{name}"):
        setattr(made, name, value)
    assert made == DelayedScaling(amax_history_len=8)
    assert made.version == 0


@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha"])
def test_fp8_attention_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"DelayedScaling.{name}"):
        DelayedScaling(**{name: True})
    with pytest.raises(UnsupportedError, match=f"DelayedScaling.{name}"):
        setattr(DelayedScaling(), name, True)


def test_an_unknown_keyword_is_refused_and_named():
    with pytest.raises(TypeError, match="amax_history_length"):
        DelayedScaling(amax_history_length=16)


def test_an_unknown_attribute_is_refused_with_the_known_ones():
    made = DelayedScaling()
    with pytest.raises(ArgumentError, match="amax_history_length") as raised:
        made.amax_history_length = 16
    assert "amax_history_len" in raised.value.accepted.split(", ")
    assert not hasattr(made, "amax_history_length")


@pytest.mark.parametrize("margin", [-100, -3, 0, 7, 100])
def test_margins_within_the_range_of_fp32_are_taken(margin):
    assert DelayedScaling(margin=margin).margin == margin
    smallest = torch.tensor(448.0 * 2.0**-margin)
    assert torch.isfinite(57344.0 * smallest / 448.0)
    assert smallest >= torch.finfo(torch.float32).tiny


PREDICATES = {
    "nvfp4": False,
    "mxfp8": False,
    "delayed": True,
    "float8_current_scaling": False,
    "float8_per_tensor_scaling": True,
    "float8_block_scaling": False,
    "custom": False,
}


class Mine(DelayedScaling):
    """What a user may derive."""


@pytest.mark.parametrize("holder", [DelayedScaling, DelayedScaling(), Mine, Mine()], ids=["class", "object", "a", "b"])
def test_predicates_answer_on_class_object_and_subclass(holder):
    assert {name: getattr(holder, name)() for name in PREDICATES} == PREDICATES


def test_recipes_are_equal_by_fields_and_not_across_classes():
    assert DelayedScaling() == DelayedScaling()
    assert DelayedScaling() != DelayedScaling(margin=1)
    assert DelayedScaling(amax_compute_algo="max") != DelayedScaling(amax_compute_algo="most_recent")
    assert DelayedScaling() != Mine()
    assert DelayedScaling() != recipe.Float8CurrentScaling()
    assert DelayedScaling() != "recipe_type=DelayedScaling"


def test_recipes_are_not_hashable_because_they_change():
    with pytest.raises(TypeError, match="unhashable"):
        hash(DelayedScaling())


def test_repr_lists_what_distinguishes_recipes():
    assert repr(DelayedScaling(amax_compute_algo="most_recent", margin=2)) == (
        "recipe_type=DelayedScaling, margin=2, format=HYBRID, amax_history_len=1024, amax_compute_algo=most_recent, "
        "reduce_amax=True, fp8_dpa=False, fp8_mha=False, backward_override=None"
    )
    assert repr(Mine()).startswith("recipe_type=Mine, ")


def test_every_assignment_is_noticed():
    made = DelayedScaling()
    assert made.version == 0
    made.margin = 3
    made.amax_history_len = 4
    assert made.version == 2
    assert made == DelayedScaling(margin=3, amax_history_len=4)
    assert "margin=3" in repr(made)


REMAKES = [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made)), dataclasses.replace]


@pytest.mark.parametrize("remake", REMAKES, ids=["copy", "deepcopy", "pickle", "replace"])
def test_a_copy_is_equal_independent_and_still_guarded(remake):
    made = DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_compute_algo="most_recent")
    again = remake(made)
    assert again == made
    again.margin = 5
    assert made.margin == 1
    with pytest.raises(ArgumentError, match="margin"):
        again.margin = "5"
    assert again.margin == 5


def test_a_callable_algorithm_survives_a_copy():
    def algorithm(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0)

    assert copy.deepcopy(DelayedScaling(amax_compute_algo=algorithm)).amax_compute_algo is algorithm


def test_the_base_class_is_no_recipe():
    with pytest.raises(TypeError, match="abstract"):
        Recipe()


def test_a_name_that_no_version_has_is_a_plain_attribute_error():
    with pytest.raises(AttributeError, match="FancyScaling") as raised:
        recipe.FancyScaling  # noqa: B018
    assert not isinstance(raised.value, TeHalError)
