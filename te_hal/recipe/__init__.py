"""Recipes as data: what to quantize, in which format, and how scales come about."""

from __future__ import annotations

from te_hal.recipe.block_scaling import Float8BlockScaling
from te_hal.recipe.current_scaling import Float8CurrentScaling
from te_hal.recipe.custom import CustomRecipe
from te_hal.recipe.delayed_scaling import DelayedScaling
from te_hal.recipe.format import Format
from te_hal.recipe.mtfp8_scaling import MTFP8BlockScaling
from te_hal.recipe.mxfp8_scaling import MXFP8BlockScaling
from te_hal.recipe.nvfp4_scaling import NVFP4BlockScaling
from te_hal.recipe.quantizer_factory import quantizer_factory
from te_hal.recipe.recipe import MMParams, QParams, Recipe

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MTFP8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "quantizer_factory",
]
