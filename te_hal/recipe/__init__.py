"""Recipes as data: what to quantize, in which format, and how scales come about."""

from __future__ import annotations

from te_hal.recipe.block_scaling import Float8BlockScaling
from te_hal.recipe.current_scaling import Float8CurrentScaling
from te_hal.recipe.custom import CustomRecipe
from te_hal.recipe.delayed_scaling import DelayedScaling
from te_hal.recipe.format import Format
from te_hal.recipe.mtfp8_scaling import MTFP8BlockScaling
from te_hal.recipe.mxfp8_scaling import MXFP8BlockScaling
from te_hal.recipe.recipe import MMParams, QParams, Recipe
from te_hal.schema.errors import NotBuiltError

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MTFP8BlockScaling",
    "MXFP8BlockScaling",
    "QParams",
    "Recipe",
]

#: Transformer Engine's other recipes.
_LATER = ("NVFP4BlockScaling",)


def __getattr__(name: str) -> object:
    if name in _LATER:
        raise NotBuiltError(
            f"te_hal.recipe.{name}",
            got="a recipe that is not built yet",
            accepted=", ".join(name for name in __all__ if name.endswith(("Scaling", "Recipe")) and name != "Recipe"),
            todo="docs/parity.md lists what is here; choose one of those",
        )
    msg = f"module 'te_hal.recipe' has no attribute {name!r}"
    raise AttributeError(msg)
