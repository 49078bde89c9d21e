"""Checks of what the blocks that take a recipe are called with: autocast and quantized_model_init."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.recipe import Recipe
from te_hal.schema.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_block(block: str, flags: Mapping[str, object], recipe: object) -> None:
    """Flags that are bools, and a recipe or None.

    Raises:
        ArgumentTypeError: one is not; a recipe in a flag's place is told apart.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            misplaced = isinstance(value, Recipe)
            raise ArgumentTypeError(
                f"{block}: {name}",
                got=f"a recipe, {type(value).__name__}" if misplaced else repr(value),
                accepted="True, False",
                todo="pass a recipe as recipe=..." if misplaced else "pass a bool",
            )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentTypeError(
            f"{block}: recipe",
            got=f"a {type(recipe).__name__}",
            accepted="an object of a class in te_hal.recipe, or None",
            todo="pass te_hal.recipe.DelayedScaling() or te_hal.recipe.Float8CurrentScaling()",
        )
