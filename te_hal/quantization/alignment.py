"""The multiple of rows that a recipe's products take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling

if TYPE_CHECKING:
    from te_hal.recipe import Recipe

_ALIGNMENT, _MXFP8_ALIGNMENT, _NVFP4_ALIGNMENT = 16, 32, 128


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What te.Fp8Padding pads groups of rows to: 32 for MXFP8, 128 for NVFP4, a CustomRecipe's own, else 16."""
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    if isinstance(recipe, MXFP8BlockScaling):
        return _MXFP8_ALIGNMENT
    return _NVFP4_ALIGNMENT if isinstance(recipe, NVFP4BlockScaling) else _ALIGNMENT
