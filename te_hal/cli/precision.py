"""The kinds of run that a comparison is made of: which dtype the parameters have and which recipe applies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import te_hal.modules as te
from te_hal.recipe import DelayedScaling, Float8CurrentScaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.recipe import Recipe

#: Recipes by the names of the command line.
RECIPES: dict[str, Callable[[], Recipe]] = {"delayed": DelayedScaling, "current": Float8CurrentScaling}

#: The run that the others are held against.
BASELINE = "bf16"


@dataclass(frozen=True)
class Precision:
    """One kind of run.

    Attributes:
        name: "bf16", "fp32" or a recipe's name.
        dtype: of parameters and activations.
        recipe: the FP8 recipe of the linear layers, or None.
    """

    name: str
    dtype: torch.dtype
    recipe: Recipe | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """The context that a forward pass runs in."""
        if self.recipe is None:
            return nullcontext()
        return te.autocast(enabled=True, recipe=self.recipe)


def run_names(recipes: tuple[str, ...]) -> tuple[str, ...]:
    """The runs of a comparison in their order: BF16, FP32, then one per recipe."""
    return (BASELINE, "fp32", *recipes)


def precision(name: str) -> Precision:
    """The run of that name, with a recipe object of its own; FP8 runs have bf16 parameters."""
    if name in RECIPES:
        return Precision(name, torch.bfloat16, RECIPES[name]())
    return Precision(name, {BASELINE: torch.bfloat16, "fp32": torch.float32}[name])
