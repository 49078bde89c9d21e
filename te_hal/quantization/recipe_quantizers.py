"""The quantizer of a role under a recipe that keeps no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.block_quantizers import Float8BlockQuantizer, MTFP8Quantizer, MXFP8Quantizer
from te_hal.quantization.current_scaling_quantizer import Float8CurrentScalingQuantizer
from te_hal.quantization.nvfp4_quantizer import NVFP4Quantizer
from te_hal.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_hal.recipe.role_settings import qparams_of
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.recipe import Recipe

#: The recipes whose quantizers follow from their fields alone.
STATELESS = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, MTFP8BlockScaling, NVFP4BlockScaling)


def make_quantizer(recipe: Recipe, role: str) -> Quantizer:
    """A quantizer with the settings of a role.

    Args:
        recipe: one of STATELESS, or of a class derived from one.
        role: "input", "weight", "output", "grad_output" or "grad_input".
    """
    if isinstance(recipe, NVFP4BlockScaling):
        fp4 = recipe.qparams_of(role)
        return NVFP4Quantizer(
            with_rht=fp4.random_hadamard_transform,
            with_post_rht_amax=fp4.random_hadamard_transform,
            with_2d_quantization=fp4.fp4_2d_quantization,
            stochastic_rounding=fp4.stochastic_rounding,
        )
    dtype, mode = recipe.element_format(forward=not role.startswith("grad")).dtype, recipe.mode_of(role)
    if mode is ScalingMode.MXFP8:
        squares = role == "weight" and getattr(recipe, "enable_2d_quantization", False)
        return MXFP8Quantizer(dtype, with_2d_quantization=squares)
    if isinstance(recipe, MTFP8BlockScaling):
        return MTFP8Quantizer(dtype, 1 if mode is ScalingMode.MTFP8_1X128 else recipe.tile_size, recipe.tile_size)
    qparams = qparams_of(recipe, role)
    if isinstance(recipe, Float8BlockScaling):
        return Float8BlockQuantizer(
            dtype,
            amax_epsilon=qparams.amax_epsilon,
            force_pow_2_scales=qparams.power_2_scale,
            block_scaling_dim=1 if mode is ScalingMode.BLOCK_1X128 else 2,
        )
    return Float8CurrentScalingQuantizer(
        dtype, force_pow_2_scales=qparams.power_2_scale, amax_epsilon=qparams.amax_epsilon
    )
