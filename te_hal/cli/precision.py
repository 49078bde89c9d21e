"""The kinds of run that a comparison is made of: which dtype the parameters have and which recipe applies where."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import te_hal.modules as te
from te_hal.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.cli.config import CompareConfig
    from te_hal.recipe import Recipe

#: Recipes by the names of the command line.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "mtfp8": MTFP8BlockScaling,
}
#: Those that a comparison is made of when it is told nothing.
DEFAULT_RECIPES = ("delayed", "current")

#: The run that the others are held against.
BASELINE = "bf16"
#: The same with another seed: what differs between the two is noise.
SECOND_SEED = "bf16-2"
_FP32 = "fp32"
_ONE_LAYER = ":1"


@dataclass(frozen=True)
class Precision:
    """One kind of run.

    Attributes:
        name: "bf16", "bf16-2", "fp32", a recipe's name, or that with ":1".
        dtype: of parameters and activations.
        recipe: the FP8 recipe of the linear layers, or None.
        one_layer: the recipe applies to the layer in the middle alone.
        more_seed: is added to the comparison's seed.
    """

    name: str
    dtype: torch.dtype
    recipe: Recipe | None = None
    one_layer: bool = False
    more_seed: int = 0

    def autocast(self) -> AbstractContextManager[object]:
        """The context that a forward pass runs in."""
        if self.recipe is None:
            return nullcontext()
        return te.autocast(enabled=True, recipe=self.recipe)

    def fp8_layers(self, layers: int) -> frozenset[int] | None:
        """Which of a model's layers take the recipe; None: all, and what else the model has."""
        return frozenset({layers // 2}) if self.one_layer else None


def run_names(config: CompareConfig) -> tuple[str, ...]:
    """The runs of a comparison in their order: BF16 with two seeds, FP32 if wanted, FP8 in one layer, in all."""
    one_layer = tuple(f"{recipe}{_ONE_LAYER}" for recipe in config.recipes) if config.from_bf16 else ()
    return (BASELINE, SECOND_SEED, *((_FP32,) if config.fp32 else ()), *one_layer, *config.recipes)


def precision(name: str) -> Precision:
    """The run of that name, with a recipe object of its own; FP8 runs have bf16 parameters."""
    recipe = name.removesuffix(_ONE_LAYER)
    if recipe in RECIPES:
        return Precision(name, torch.bfloat16, RECIPES[recipe](), one_layer=name != recipe)
    if name == SECOND_SEED:
        return Precision(name, torch.bfloat16, more_seed=1)
    return Precision(name, {BASELINE: torch.bfloat16, _FP32: torch.float32}[name])
