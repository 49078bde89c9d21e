"""Float8BlockScaling, MXFP8BlockScaling, MTFP8BlockScaling: fields, refusals, predicates, defaults from variables."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from te_hal.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Format,
    MMParams,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    QParams,
)
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_hal.schema.formats import ScalingMode

RECIPES = {recipe.__name__: recipe for recipe in (Float8BlockScaling, MXFP8BlockScaling, MTFP8BlockScaling)}
QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

#: Recipe, field, value, and what the error says is accepted.
BAD = [
    *[(name, "fp8_format", Format.E5M2, "gradients only") for name in RECIPES],
    *[(name, "fp8_format", Format.E2M1, "Format.E4M3") for name in RECIPES],
    *[(name, "fp8_dpa", 1, "bool") for name in RECIPES],
    *[(name, "fp8_mha", None, "bool") for name in RECIPES],
    ("Float8BlockScaling", "use_f32_scales", 1, "bool"),
    ("Float8BlockScaling", "x_block_scaling_dim", 3, "1 (1x128 blocks), 2 (128x128 blocks)"),
    ("Float8BlockScaling", "w_block_scaling_dim", 0, "1 (1x128 blocks)"),
    ("Float8BlockScaling", "grad_block_scaling_dim", True, "1 (1x128 blocks)"),
    ("Float8BlockScaling", "w_block_scaling_dim", "2", "1 (1x128 blocks)"),
    ("Float8BlockScaling", "fp8_gemm_fprop", MMParams(use_split_accumulator=False), "True"),
    ("Float8BlockScaling", "fp8_gemm_dgrad", MMParams(use_split_accumulator=False), "True"),
    ("Float8BlockScaling", "fp8_gemm_wgrad", None, "MMParams"),
    ("Float8BlockScaling", "backward_override", "bf16", "'high_precision'"),
    ("MXFP8BlockScaling", "backward_override", "bf16", "'high_precision'"),
    ("MXFP8BlockScaling", "margin", 1, "from 0 to 0"),
    ("MXFP8BlockScaling", "margin", "0", "int"),
    ("MXFP8BlockScaling", "enable_2d_quantization", 1, "bool"),
    ("MTFP8BlockScaling", "margin", -1, "from 0 to 0"),
    ("MTFP8BlockScaling", "tile_size", 64, "from 128 to 128"),
]

LATER = [
    *[(name, "fp8_dpa", True) for name in RECIPES],
    *[(name, "fp8_mha", True) for name in RECIPES],
]


@pytest.mark.parametrize(("name", "field", "value", "accepted"), BAD, ids=lambda part: str(part)[:40])
def test_a_bad_value_is_refused_with_the_fields_name_and_changes_nothing(name, field, value, accepted):
    kind = RECIPES[name]
    with pytest.raises(ArgumentError, match=f"{name}.{field}") as raised:
        kind(**{field: value})
    assert accepted in raised.value.accepted
    made = kind()
    with pytest.raises(ArgumentError, match=f"{name}.{field}"):
        setattr(made, field, value)
    assert made == kind()


@pytest.mark.parametrize(("name", "field", "value"), LATER)
def test_what_is_not_built_is_refused_by_name(name, field, value):
    with pytest.raises(UnsupportedError, match=f"{name}.{field}"):
        RECIPES[name](**{field: value})


@pytest.mark.parametrize("second", ["x_block_scaling_dim", "grad_block_scaling_dim"])
def test_two_operands_with_square_blocks_are_refused(second):
    with pytest.raises(ArgumentError, match=r"Float8BlockScaling\.\w+_block_scaling_dim.*at most one 2"):
        Float8BlockScaling(**{second: 2})
    assert Float8BlockScaling(w_block_scaling_dim=1, **{second: 2}).w_block_scaling_dim == 1


@pytest.mark.parametrize("name", RECIPES)
def test_an_unknown_keyword_or_attribute_is_refused(name):
    with pytest.raises(ArgumentTypeError, match=f"{name}: got keyword 'formt'; accepted: .*fp8_format.*spelling"):
        RECIPES[name](formt=1)
    with pytest.raises(ArgumentError, match="formt"):
        RECIPES[name]().formt = 1


@pytest.mark.parametrize("value", ["high_precision", "dequantized", None])
def test_moore_threads_blocks_say_why_they_have_no_overridden_backward(value):
    said = r"MTFP8BlockScaling\.backward_override: got .*; accepted: no such field.*quantized.*use Float8BlockScaling"
    with pytest.raises(ArgumentTypeError, match=said):
        MTFP8BlockScaling(backward_override=value)
    with pytest.raises(ArgumentError, match=said):
        MTFP8BlockScaling().backward_override = value


def test_a_field_that_follows_from_others_is_no_keyword_and_the_error_says_how_to_set_it():
    with pytest.raises(ArgumentTypeError, match=r"got keyword 'fp8_quant_fwd_inp'.*assign it to the object"):
        Float8BlockScaling(fp8_quant_fwd_inp=QParams())
    made = Float8BlockScaling()
    made.fp8_quant_fwd_inp = QParams(amax_epsilon=1.0)
    assert made.fp8_quant_fwd_inp.amax_epsilon == 1.0


def test_a_derived_recipe_takes_the_keywords_of_its_own():
    @dataclasses.dataclass(repr=False)
    class WithField(MXFP8BlockScaling):
        note: str = ""

    class WithKeywords(MXFP8BlockScaling):
        def __init__(self, **given: object) -> None:
            super().__init__(margin=given["least"])

    assert WithField(note="mine", fp8_format=Format.HYBRID).note == "mine"
    assert WithKeywords(least=0) == WithKeywords(least=0)
    with pytest.raises(ArgumentTypeError, match=r"WithField: got keyword 'nota'; accepted: .*note"):
        WithField(nota="mine")


def test_the_defaults_are_those_of_transformer_engine():
    block, mx = Float8BlockScaling(), MXFP8BlockScaling()
    assert (block.use_f32_scales, block.fp8_format, block.backward_override) == (False, Format.E4M3, None)
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (1, 2, 1)
    assert [getattr(block, f"fp8_gemm_{layout}") for layout in ("fprop", "dgrad", "wgrad")] == [MMParams(True)] * 3
    assert [getattr(block, name) for name in QPARAMS] == [QParams(power_2_scale=True)] * 3
    assert (mx.margin, mx.fp8_format, mx.enable_2d_quantization) == (0, Format.E4M3, False)
    assert MTFP8BlockScaling().fp8_format is Format.HYBRID


PREDICATES = ("nvfp4", "mxfp8", "delayed", "float8_current_scaling", "float8_block_scaling", "mtfp8_block_scaling")
IS = {
    "Float8BlockScaling": "float8_block_scaling",
    "MXFP8BlockScaling": "mxfp8",
    "MTFP8BlockScaling": "mtfp8_block_scaling",
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_predicates_know_the_class_and_its_objects(name):
    for asked in (RECIPES[name], RECIPES[name]()):
        assert [predicate for predicate in PREDICATES if getattr(asked, predicate)()] == [IS[name]]
        assert not asked.float8_per_tensor_scaling()
        assert not asked.custom()


ROLES = ("input", "weight", "output", "grad_output", "grad_input")
MODES = {
    "Float8BlockScaling": ("block_1x128", "block_128x128", "block_1x128", "block_1x128", "block_1x128"),
    "MXFP8BlockScaling": ("mxfp8",) * 5,
    "MTFP8BlockScaling": ("mtfp8_1x128", "mtfp8_128x128", "mtfp8_1x128", "mtfp8_1x128", "mtfp8_1x128"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_role_has_its_blocks(name):
    assert tuple(map(RECIPES[name]().mode_of, ROLES)) == MODES[name]


def test_dimensions_choose_the_blocks_of_their_role():
    made = Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2)
    square = ScalingMode.BLOCK_128X128
    assert [role for role in ROLES if made.mode_of(role) is square] == ["grad_output", "grad_input"]


def test_use_f32_scales_takes_effect_however_it_is_set_and_keeps_other_settings():
    made = Float8BlockScaling(use_f32_scales=True)
    assert [getattr(made, name).power_2_scale for name in QPARAMS] == [False] * 3
    made = Float8BlockScaling()
    made.fp8_quant_fwd_inp = QParams(power_2_scale=True, amax_epsilon=1e-3)
    made.use_f32_scales = True
    assert made.fp8_quant_fwd_inp == QParams(amax_epsilon=1e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_is_noticed_by_version_and_equality(name):
    made = RECIPES[name]()
    assert made == RECIPES[name]()
    assert made != DelayedScaling()
    other = Format.E4M3 if name == "MTFP8BlockScaling" else Format.HYBRID
    version = made.version
    made.fp8_format = other
    assert made.version == version + 1
    assert made != RECIPES[name]()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_is_equal(remake, name):
    made = RECIPES[name](fp8_format=Format.HYBRID)
    assert remake(made) == made


def test_the_printed_forms_name_class_format_and_what_differs():
    assert repr(MXFP8BlockScaling()) == (
        "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3, backward_override=None, enable_2d_quantization=False"
    )
    assert repr(MTFP8BlockScaling()).startswith("recipe_type=MTFP8BlockScaling, margin=0, format=HYBRID")
    shown = repr(Float8BlockScaling(w_block_scaling_dim=1))
    assert shown.startswith("recipe_type=Float8BlockScaling, format=E4M3")
    assert "w_block_scaling_dim=1" in shown


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("off", False)])
def test_the_variable_is_the_start_value_of_use_f32_scales(value, wanted):
    code = "from te_hal.recipe import Float8BlockScaling as R; print(R().use_f32_scales, R().fp8_quant_fwd_inp)"
    environment = {**os.environ, "TE_HAL_FP8_BLOCK_SCALING_FP32_SCALES": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{wanted} QParams(power_2_scale={not wanted}")
