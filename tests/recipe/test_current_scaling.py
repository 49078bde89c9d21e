"""Float8CurrentScaling: fields, refusals, settings per role, and that use_power_2_scales has its effect."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import pytest
import torch

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams
from te_hal.schema.errors import ArgumentError

ROLES = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

BAD = [
    ("use_power_2_scales", 1, "bool"),
    ("use_power_2_scales", "0", "bool"),
    ("use_power_2_scales", None, "bool"),
    ("fp8_format", Format.E5M2, "gradients only"),
    ("fp8_format", "E4M3", "Format.E4M3"),
    ("fp8_gemm_fprop", True, "MMParams"),
    ("fp8_gemm_dgrad", None, "MMParams"),
    ("fp8_gemm_wgrad", {"use_split_accumulator": True}, "MMParams"),
    ("fp8_dpa", 0, "bool"),
    ("fp8_mha", None, "bool"),
    ("backward_override", "bf16", "'high_precision'"),
    ("backward_override", False, "None"),
]

BAD_QPARAMS = [
    (None, "QParams"),
    (QParams(power_2_scale=1), "bool"),
    (QParams(amax_epsilon=-1.0), "from 0.0 to 3.4028234663852886e+38"),
    (QParams(amax_epsilon=float("nan")), "from 0.0 to 3.4028234663852886e+38"),
    (QParams(amax_epsilon=float("inf")), "from 0.0 to 3.4028234663852886e+38"),
    (QParams(amax_epsilon="1e-4"), "float"),
    (QParams(amax_epsilon=None), "float"),
    (QParams(amax_epsilon=True), "float"),
    (QParams(random_hadamard_transform=True), "4-bit"),
    (QParams(stochastic_rounding=True), "4-bit"),
    (QParams(fp4_2d_quantization=True), "4-bit"),
    (QParams(stochastic_rounding=None), "4-bit"),
]


def test_the_defaults_are_those_of_transformer_engine():
    made = Float8CurrentScaling()
    assert made.use_power_2_scales is False
    assert made.fp8_format is Format.HYBRID
    assert [getattr(made, f"fp8_gemm_{layout}") for layout in ("fprop", "dgrad", "wgrad")] == [
        MMParams(use_split_accumulator=False),
        MMParams(use_split_accumulator=True),
        MMParams(use_split_accumulator=True),
    ]
    assert (made.fp8_dpa, made.fp8_mha, made.backward_override) == (False, False, None)
    assert [getattr(made, role) for role in ROLES] == [QParams()] * 3
    assert QParams() == QParams(False, 0.0, False, False, False)
    assert MMParams() == MMParams(True)


@pytest.mark.parametrize(("name", "value", "accepted"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_a_bad_value_is_refused_in_construction_and_assignment(name, value, accepted):
    with pytest.raises(ArgumentError, match=f"Float8CurrentScaling.{name}") as raised:
        Float8CurrentScaling(**{name: value})
    assert accepted in raised.value.accepted
    made = Float8CurrentScaling(use_power_2_scales=True)
    with pytest.raises(ArgumentError, match=f"Float8CurrentScaling.{name}"):
        setattr(made, name, value)
    assert made == Float8CurrentScaling(use_power_2_scales=True)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("value", "accepted"), BAD_QPARAMS, ids=[str(value) for value, _ in BAD_QPARAMS])
def test_bad_settings_of_a_role_are_refused_and_the_old_ones_stay(role, value, accepted):
    made = Float8CurrentScaling()
    with pytest.raises(ArgumentError, match=f"Float8CurrentScaling.{role}") as raised:
        setattr(made, role, value)
    assert accepted in raised.value.accepted
    assert made == Float8CurrentScaling()


@pytest.mark.parametrize("name", ["power_2_scales", *ROLES])
def test_a_keyword_that_would_have_no_effect_is_refused(name):
    with pytest.raises(TypeError, match=name):
        Float8CurrentScaling(**{name: QParams()})


def test_use_power_2_scales_reaches_every_role_however_it_is_set():
    for made in (Float8CurrentScaling(use_power_2_scales=True), Float8CurrentScaling()):
        made.use_power_2_scales = True
        assert [getattr(made, role).power_2_scale for role in ROLES] == [True] * 3
    made.use_power_2_scales = False
    assert made == Float8CurrentScaling()


def test_switching_power_2_scales_keeps_a_roles_other_settings():
    made = Float8CurrentScaling()
    made.fp8_quant_fwd_inp = QParams(amax_epsilon=1e-3)
    made.use_power_2_scales = True
    assert made.fp8_quant_fwd_inp == QParams(power_2_scale=True, amax_epsilon=1e-3)


def scales_of(module: te.Linear, recipe: Float8CurrentScaling) -> list[float]:
    """The scale_inv of the input's, the weight's and the gradient's quantized copies, as backward finds them."""
    x = torch.full((16, 32), 3.0, requires_grad=True)
    saved: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
        te.autocast(recipe=recipe),
    ):
        output = module(x, fp8_output=True)
    output.dequantize().sum().backward()
    found = [t for t in saved if t is not None and t.dtype == torch.float32 and t.numel() == 1]
    return [*sorted({float(t) for t in found}), float(output._scale_inv)]


def test_linear_uses_power_of_2_scales_when_the_recipe_says_so():
    module = te.Linear(32, 32, bias=False, init_method=lambda w: torch.nn.init.constant_(w, 0.7))
    plain = scales_of(module, Float8CurrentScaling())
    rounded = scales_of(module, Float8CurrentScaling(use_power_2_scales=True))
    assert plain[:2] == [float(torch.tensor(1.0) / (torch.tensor(448.0) / torch.tensor(v))) for v in (0.7, 3.0)]
    # 448 / 0.7 = 640 and 448 / 3 = 149.3, rounded down to powers of two
    assert rounded[:2] == [1 / 512, 1 / 128]
    assert torch.frexp(torch.tensor(rounded))[0].eq(0.5).all()
    assert not torch.frexp(torch.tensor(plain))[0].eq(0.5).any()


def test_each_role_of_linear_gets_its_own_settings():
    module = te.Linear(32, 32)
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True, amax_epsilon=0.5)
    recipe.fp8_quant_fwd_weight = QParams(amax_epsilon=0.25)
    recipe.fp8_quant_bwd_grad = QParams(power_2_scale=True, amax_epsilon=2)
    with te.autocast(recipe=recipe):
        module(torch.randn(16, 32))
    found = [
        (q.force_pow_2_scales, q.amax_epsilon)
        for q in (*module.quantizers["scaling_fwd"], *module.quantizers["scaling_bwd"])
    ]
    # What leaves the module, output and grad_input, is no operand of it.
    assert found == [(True, 0.5), (False, 0.25), (False, 0.0), (True, 2.0), (False, 0.0)]


PREDICATES = {
    "nvfp4": False,
    "mxfp8": False,
    "delayed": False,
    "float8_current_scaling": True,
    "float8_per_tensor_scaling": True,
    "float8_block_scaling": False,
    "custom": False,
}


class Mine(Float8CurrentScaling):
    """What a user may derive."""


@pytest.mark.parametrize("holder", [Float8CurrentScaling, Float8CurrentScaling(), Mine, Mine()], ids=list("abcd"))
def test_predicates_answer_on_class_object_and_subclass(holder):
    assert {name: getattr(holder, name)() for name in PREDICATES} == PREDICATES


def test_equality_is_by_fields_settings_of_roles_included():
    assert Float8CurrentScaling() == Float8CurrentScaling()
    assert Float8CurrentScaling() != Float8CurrentScaling(use_power_2_scales=True)
    assert Float8CurrentScaling() != DelayedScaling()
    changed = Float8CurrentScaling()
    changed.fp8_quant_bwd_grad = QParams(amax_epsilon=1.0)
    assert changed != Float8CurrentScaling()


@pytest.mark.parametrize(
    "remake", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))], ids=["copy", "deep", "pickle"]
)
def test_a_copy_is_equal_independent_and_still_guarded(remake):
    made = Float8CurrentScaling(fp8_format=Format.E4M3)
    made.fp8_quant_fwd_weight = QParams(amax_epsilon=1e-5)
    again = remake(made)
    assert again == made
    again.use_power_2_scales = True
    assert made.fp8_quant_fwd_weight == QParams(amax_epsilon=1e-5)
    with pytest.raises(ArgumentError, match="fp8_format"):
        again.fp8_format = Format.E5M2


def test_settings_of_a_role_cannot_be_changed_behind_the_recipes_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Float8CurrentScaling().fp8_quant_fwd_inp.power_2_scale = True


def test_repr_names_class_and_format_like_transformer_engine():
    text = repr(Float8CurrentScaling(use_power_2_scales=True))
    assert text.startswith("recipe_type=Float8CurrentScaling, format=HYBRID, ")
    assert "power_2_scale=True" in text
    assert "fp8_gemm_fprop=MMParams(use_split_accumulator=False)" in text


START = (
    "from te_hal.recipe import Float8CurrentScaling as R; r = R(); "
    "print(r.use_power_2_scales, r.fp8_quant_fwd_weight.power_2_scale, R(use_power_2_scales=False).use_power_2_scales)"
)


def test_the_environment_gives_the_start_value():
    environment = {**os.environ, "TE_HAL_FP8_CURRENT_SCALING_POWER_2_SCALES": "yes"}
    result = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == ["True", "True", "False"]
