"""NVFP4BlockScaling: fields, what follows from them, and what is refused by name."""

from __future__ import annotations

import pickle

import pytest

from te_hal.recipe import Format, MXFP8BlockScaling, NVFP4BlockScaling, QParams
from te_hal.schema.environment import parse
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import E2M1

ROLES = ("input", "weight", "output", "grad_output", "grad_input")
HADAMARD, PLAIN, SQUARE = "nvfp4_hadamard", "nvfp4", "nvfp4_16x16"


@pytest.mark.parametrize(
    ("switches", "modes"),
    [
        ({}, (HADAMARD, SQUARE, HADAMARD, HADAMARD, HADAMARD)),
        ({"disable_rht": True}, (PLAIN, SQUARE, PLAIN, PLAIN, PLAIN)),
        ({"disable_2d_quantization": True}, (HADAMARD, PLAIN, HADAMARD, HADAMARD, HADAMARD)),
        ({"disable_rht": True, "disable_2d_quantization": True}, (PLAIN,) * 5),
    ],
    ids=str,
)
def test_switches_decide_what_is_scaled_in_each_role(switches: dict[str, bool], modes: tuple[str, ...]) -> None:
    made, assigned = NVFP4BlockScaling(**switches), NVFP4BlockScaling()
    for name, value in switches.items():
        setattr(assigned, name, value)
    for recipe in (made, assigned):
        assert tuple(recipe.mode_of(role) for role in ROLES) == modes
        assert {recipe.element_format(forward=forward) for forward in (True, False)} == {E2M1}


def test_chance_rounds_gradients_alone_unless_it_is_switched_off() -> None:
    recipe = NVFP4BlockScaling()
    assert [recipe.qparams_of(role).stochastic_rounding for role in ROLES] == [False, False, False, True, True]
    recipe.disable_stochastic_rounding = True
    assert not any(recipe.qparams_of(role).stochastic_rounding for role in ROLES)


def test_settings_of_a_role_can_be_assigned_and_a_change_is_noticed() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True)
    before = recipe.version
    recipe.fp4_quant_fwd_inp = QParams(stochastic_rounding=True)
    assert recipe.version > before
    assert recipe.qparams_of("input").stochastic_rounding


def test_predicates_and_the_short_form_name_it() -> None:
    recipe = NVFP4BlockScaling()
    assert recipe.nvfp4()
    assert NVFP4BlockScaling.nvfp4()
    others = (recipe.mxfp8(), recipe.delayed(), recipe.float8_block_scaling(), MXFP8BlockScaling.nvfp4())
    assert not any(others)
    assert repr(recipe).startswith("recipe_type=NVFP4BlockScaling, disable_rht=False")
    assert pickle.loads(pickle.dumps(recipe)) == recipe


REFUSED = {
    "row_scaled_activation": (True, UnsupportedError, "no op has a scale per row"),
    "nvfp4_4over6": ("weights", UnsupportedError, "4-over-6"),
    "nvfp4_4over6_e4m3_use_256": ("none", UnsupportedError, "4-over-6"),
    "nvfp4_4over6_err_mode": ("MSE", UnsupportedError, "4-over-6"),
    "fp8_dpa": (True, UnsupportedError, "FP8 attention"),
    "fp8_mha": (True, UnsupportedError, "FP8 attention"),
}
WRONG = {
    "nvfp4_4over6": ("gradients", "'none', 'weights', 'activations', 'all'"),
    "nvfp4_4over6_err_mode": ("MAX", "'MAE', 'MSE'"),
    "fp4_format": (Format.E4M3, "Format.E2M1"),
    "fp8_format": (Format.HYBRID, "Format.E4M3"),
    "disable_rht": (1, "bool"),
    "disable_stochastic_rounding": ("no", "bool"),
    "disable_2d_quantization": (None, "bool"),
    "row_scaled_activation": ("yes", "bool"),
    "backward_override": ("none", "'high_precision'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_op_has_is_refused_by_name(name: str) -> None:
    value, error, message = REFUSED[name]
    with pytest.raises(error, match=f"NVFP4BlockScaling.{name}: .*{message}"):
        NVFP4BlockScaling(**{name: value})


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused_by_name_and_changes_nothing(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ArgumentError, match=f"NVFP4BlockScaling.{name}: .*{message}"):
        NVFP4BlockScaling(**{name: value})
    recipe = NVFP4BlockScaling()
    with pytest.raises(ArgumentError):
        setattr(recipe, name, value)
    assert recipe == NVFP4BlockScaling()


@pytest.mark.parametrize(
    ("name", "qparams", "message"),
    [
        ("fp4_quant_bwd_grad", QParams(), "random_hadamard_transform as fp4_quant_fwd_inp has it"),
        ("fp4_quant_fwd_inp", QParams(), "random_hadamard_transform as fp4_quant_fwd_inp has it"),
        ("fp4_quant_fwd_weight", QParams(random_hadamard_transform=True), "no random_hadamard_transform"),
        ("fp4_quant_fwd_weight", QParams(fp4_2d_quantization=True, stochastic_rounding=True), "2d_quantization alone"),
        ("fp4_quant_fwd_weight", QParams(power_2_scale=True), "belongs to 8-bit recipes"),
        ("fp4_quant_fwd_weight", QParams(amax_epsilon=1.0), "belongs to 8-bit recipes"),
        ("fp4_quant_fwd_weight", None, "QParams"),
    ],
)
def test_settings_without_a_meaning_are_refused(name: str, qparams: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        setattr(NVFP4BlockScaling(), name, qparams)


def test_start_values_come_from_the_environment() -> None:
    names = ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION")
    given = parse({f"TE_HAL_NVFP4_DISABLE_{name}": "1" for name in names})
    assert given.nvfp4_disable_rht
    assert given.nvfp4_disable_stochastic_rounding
    assert given.nvfp4_disable_2d_quantization
    assert not given.unknown
    assert not parse({}).nvfp4_disable_rht
