"""What a comparison was asked to do: its options, what they may be, and what makes two of them the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.cli.precision import RECIPES
from te_hal.schema.errors import ArgumentError, NotBuiltError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Bytes that a prediction looks back on.
CONTEXT = 64

#: Of int64.
_LARGEST = 2**63 - 1

MODELS = ("mlp",)
_LATER_MODELS = {"gpt": 'it comes with "Transformer modules and the GPT main job"'}
_LATER_RECIPES = dict.fromkeys(("block", "mxfp8", "nvfp4", "custom"), "docs/parity.md lists the recipes that are here")


@dataclass(frozen=True)
class CompareConfig:
    """The options that decide every number of a comparison but its times.

    Attributes:
        model: kind of model, one of MODELS.
        recipes: FP8 runs beside the BF16 and FP32 ones, in order, each one of RECIPES.
        steps: optimizer steps per run.
        width: features of the hidden layers; a multiple of 16.
        layers: residual blocks of two linear layers each.
        batch: predictions per step; a multiple of 8.
        seed: of the initial weights and of the order of the data.
        lr: highest learning rate.

    Raises:
        ArgumentError: a value is out of range.
        NotBuiltError: a model or recipe that is not built yet.
    """

    model: str = "mlp"
    recipes: tuple[str, ...] = tuple(RECIPES)
    steps: int = 400
    width: int = 256
    layers: int = 2
    batch: int = 1024
    seed: int = 0
    lr: float = 3e-3

    def __post_init__(self) -> None:
        _check_choice("--model", self.model, MODELS, _LATER_MODELS)
        for recipe in self.recipes or ("",):
            _check_choice("--recipe", recipe, tuple(RECIPES), _LATER_RECIPES)
        check_count("--steps", self.steps)
        check_count("--width", self.width, multiple=16)
        check_count("--layers", self.layers)
        check_count("--batch", self.batch, multiple=8)
        check_count("--seed", self.seed, least=0)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ArgumentError(
                "te-hal compare: --lr",
                got=str(self.lr),
                accepted="a finite number above 0",
                todo="the default is 0.003",
            )


def check_count(option: str, value: int, *, multiple: int = 1, least: int = 1) -> None:
    """Refuse a number below `least`, above what torch counts with, or not a multiple of `multiple`.

    Raises:
        ArgumentError: naming the option.
    """
    if least <= value <= _LARGEST and value % multiple == 0:
        return
    wanted = f"an integer from {least} to {_LARGEST}"
    todo = "choose another value"
    if multiple > 1:
        wanted = f"a positive multiple of {multiple} up to {_LARGEST}"
        nearest = (value + multiple // 2) // multiple * multiple
        todo = f"FP8 needs it; the nearest is {min(max(multiple, nearest), _LARGEST // multiple * multiple)}"
    raise ArgumentError(f"te-hal compare: {option}", got=str(value), accepted=wanted, todo=todo)


def split_names(values: Iterable[str]) -> tuple[str, ...]:
    """The names in a repeatable option whose values may be comma-separated; doubles are dropped."""
    names = (name.strip() for value in values for name in value.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def _check_choice(option: str, value: str, choices: tuple[str, ...], later: dict[str, str]) -> None:
    where = f"te-hal compare: {option}"
    accepted = ", ".join(choices)
    if value in later:
        raise NotBuiltError(where, got=f"{value!r}, which is not built yet", accepted=accepted, todo=later[value])
    if value not in choices:
        raise ArgumentError(where, got=repr(value), accepted=accepted, todo="choose one of these")
