"""Settings per role that recipes share: scales (QParams) and products (MMParams)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_hal.recipe.recipe import MMParams, QParams, check_is, check_number
from te_hal.schema.environment import OVERRIDES
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from te_hal.recipe.recipe import Recipe

_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")


def derived_qparams(recipe: Recipe, *, power_2_scale: bool) -> dict[str, QParams]:
    """The QParams fields of a recipe with another ``power_2_scale``, everything else as it is."""
    return {name: replace(recipe.__dict__.get(name, QParams()), power_2_scale=power_2_scale) for name in _QPARAMS}


def qparams_of(recipe: Recipe, role: str) -> QParams:
    """The settings of a role: those of gradients, of the weight, or of input and output.

    What leaves a module under current scaling, output and grad_input, has defaults and the recipe's
    ``use_power_2_scales``: it is another module's operand, which the settings of this one's say nothing about.
    """
    if role in ("output", "grad_input") and recipe.float8_current_scaling():
        return QParams(power_2_scale=recipe.__dict__["use_power_2_scales"])
    if role.startswith("grad"):
        name = "fp8_quant_bwd_grad"
    else:
        name = "fp8_quant_fwd_weight" if role == "weight" else "fp8_quant_fwd_inp"
    qparams: QParams = getattr(recipe, name)
    return qparams


def check_qparams(recipe: Recipe) -> None:
    """Refuse settings of scales that are no QParams, or ask for what belongs to 4-bit recipes.

    Raises:
        ArgumentError: names the field.
    """
    for name in _QPARAMS:
        qparams = getattr(recipe, name)
        check_is(recipe, name, qparams, QParams)
        check_is(recipe, f"{name}.power_2_scale", qparams.power_2_scale, bool)
        check_number(recipe, f"{name}.amax_epsilon", qparams.amax_epsilon, (float, int), 0.0, FLOAT32_MAX)
        for extra in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
            if getattr(qparams, extra) is not False:
                raise ArgumentError(
                    f"{type(recipe).__name__}.{name}.{extra}",
                    got=repr(getattr(qparams, extra)),
                    accepted="False: it belongs to 4-bit recipes",
                    todo="leave it out",
                )


def check_gemms(recipe: Recipe, *, split_accumulator: bool = False) -> None:
    """Refuse settings of products that are no MMParams.

    Args:
        recipe: to check.
        split_accumulator: refuse also those without ``use_split_accumulator``.

    Raises:
        ArgumentError: names the field.
    """
    for name in _GEMMS:
        params = getattr(recipe, name)
        check_is(recipe, name, params, MMParams)
        if split_accumulator and params.use_split_accumulator is not True:
            raise ArgumentError(
                f"{type(recipe).__name__}.{name}.use_split_accumulator",
                got=repr(params.use_split_accumulator),
                accepted="True: products of blocks always sum that way",
                todo="leave the field out",
            )


def check_backward_override(recipe: Recipe, value: object) -> None:
    """Refuse what says nothing about the backward.

    Raises:
        ArgumentError: neither None nor one of the two overrides.
    """
    if value is not None and value not in OVERRIDES:
        raise ArgumentError(
            f"{type(recipe).__name__}.backward_override",
            got=repr(value),
            accepted=", ".join(map(repr, (None, *OVERRIDES))),
            todo="correct the field",
        )
