"""What a comparison was asked to do: its options, what they may be, and what makes two of them the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.cli.precision import DEFAULT_RECIPES, RECIPES
from te_hal.modules.shape_rule import LAST_MULTIPLE, LEADING_MULTIPLE, MXFP8_MULTIPLE, NVFP4_MULTIPLE
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Of int64.
_LARGEST = 2**63 - 1

#: Experts that a byte goes to, where there are as many.
_TOP_K = 2

#: Values of the options that are left out, by kind of model; the first kind is the default one.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {"steps": 400, "width": 128, "layers": 2, "heads": 4, "sequence": 64, "batch": 16, "lr": 1e-3},
    "mlp": {"steps": 400, "width": 256, "layers": 2, "heads": 0, "sequence": 64, "batch": 1024, "lr": 3e-3},
}
MODELS = tuple(DEFAULTS)


@dataclass(frozen=True)
class CompareConfig:
    """The options that decide every number of a comparison but its times; :func:`configure` fills in defaults.

    Attributes:
        model: kind of model, one of MODELS.
        recipes: the FP8 runs, in order, each one of RECIPES.
        steps: optimizer steps per run.
        width: features of the hidden layers; a multiple of 16, with mxfp8 of 32.
        layers: layers of the GPT, residual blocks of the MLP.
        heads: attention heads, which divide the width; 0 for the MLP.
        experts: of each layer's mixture, in place of its MLP; 0 for none.
        top_k: experts that a byte goes to; 0 without any.
        sequence: bytes that the model looks back on; of the GPT a multiple of :attr:`rows`.
        batch: sequences per step; of the MLP windows, which predict one byte each, in multiples of :attr:`rows`.
        seed: of the initial weights and of the order of the data.
        lr: highest learning rate.
        fp32: have a run in FP32 too.
        from_bf16: before the runs with all layers in FP8, have runs with one.
        sample: bytes that each model writes at its end.

    Raises:
        ArgumentError: a value is out of range.
    """

    model: str
    recipes: tuple[str, ...]
    steps: int
    width: int
    layers: int
    heads: int
    experts: int
    top_k: int
    sequence: int
    batch: int
    seed: int
    lr: float
    fp32: bool
    from_bf16: bool
    sample: int

    def __post_init__(self) -> None:
        _check_choice("--model", self.model, MODELS)
        for recipe in self.recipes or ("",):
            _check_choice("--recipe", recipe, tuple(RECIPES))
        check_count("--steps", self.steps)
        mxfp8 = "mxfp8" in self.recipes
        check_count("--width", self.width, multiple=MXFP8_MULTIPLE if mxfp8 else LAST_MULTIPLE)
        check_count("--layers", self.layers)
        gpt = self.model == "gpt"
        check_count("--sequence", self.sequence, multiple=self.rows if gpt else 1)
        check_count("--batch", self.batch, multiple=1 if gpt else self.rows)
        check_count("--seed", self.seed, least=0)
        check_count("--sample", self.sample, least=0)
        self._check_heads()
        self._check_experts()
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ArgumentError(
                "te-hal compare: --lr",
                got=str(self.lr),
                accepted="a finite number above 0",
                todo=f"leave it out for the default, {DEFAULTS[self.model]['lr']}",
            )

    def _check_heads(self) -> None:
        if self.model != "gpt":
            if self.heads:
                raise ArgumentError(
                    "te-hal compare: --heads",
                    got=f"{self.heads} for --model {self.model}",
                    accepted="a model with attention",
                    todo="leave --heads out, or choose --model gpt",
                )
            return
        check_count("--heads", self.heads)
        if self.width % self.heads:
            dividing = [str(n) for n in range(1, min(self.width, 4 * self.heads) + 1) if self.width % n == 0]
            raise ArgumentError(
                "te-hal compare: --heads",
                got=f"{self.heads}, with --width {self.width}",
                accepted=f"a number that divides the width, such as {', '.join(dividing[-4:])}",
                todo="choose another number of heads or another width",
            )

    def _check_experts(self) -> None:
        check_count("--experts", self.experts, least=0)
        most = self.experts if self.model == "gpt" else 0
        if self.experts > most:
            raise ArgumentError(
                "te-hal compare: --experts",
                got=f"{self.experts} for --model {self.model}",
                accepted="a model whose layers have an MLP to replace",
                todo="leave --experts out, or choose --model gpt",
            )
        if not min(1, most) <= self.top_k <= most:
            raise ArgumentError(
                "te-hal compare: --top-k",
                got=f"{self.top_k}, with --experts {self.experts}",
                accepted=f"a number from 1 to {most}" if most else "--experts too",
                todo="choose another number" if most else "leave --top-k out, or choose a number of experts",
            )

    @property
    def rows(self) -> int:
        """Of activations: what their number is a multiple of (te_hal.modules.shape_rule)."""
        if "mxfp8" in self.recipes:
            return MXFP8_MULTIPLE
        return NVFP4_MULTIPLE if "nvfp4" in self.recipes else LEADING_MULTIPLE

    @property
    def tokens(self) -> int:
        """Predictions per step; a token is a byte."""
        return self.batch * self.sequence if self.model == "gpt" else self.batch


def configure(model: str = MODELS[0], **given: Any) -> CompareConfig:  # noqa: ANN401 - the fields of CompareConfig
    """The configuration with these options, and the model's defaults for those that are None or left out.

    Raises:
        ArgumentError: as CompareConfig.
    """
    _check_choice("--model", model, MODELS)
    shared = {"recipes": DEFAULT_RECIPES, "seed": 0, "fp32": False, "from_bf16": False, "sample": 120, "experts": 0}
    chosen = {name: value for name, value in given.items() if value is not None}
    experts = chosen.get("experts", 0)
    shared["top_k"] = min(_TOP_K, experts) if type(experts) is int and experts > 0 else 0
    return CompareConfig(**{"model": model, **shared, **DEFAULTS[model], **chosen})


def default_text(option: str) -> str:
    """What an option is when it is left out, for its help."""
    values = {model: defaults[option] for model, defaults in DEFAULTS.items() if defaults[option]}
    if len(set(values.values())) == 1:
        return f"default: {next(iter(values.values()))}"
    return "default: " + ", ".join(f"{value} ({model})" for model, value in values.items())


def check_start(start: str | None) -> bool:
    """Whether `--from` asks for the walk from BF16 to FP8.

    Raises:
        ArgumentError: anything but "bf16".
    """
    if start is not None:
        _check_choice("--from", start, ("bf16",))
    return start is not None


def check_count(option: str, value: int, *, multiple: int = 1, least: int = 1, most: int = _LARGEST) -> None:
    """Refuse a number below `least`, above `most` (what torch counts with), or not a multiple of `multiple`.

    Raises:
        ArgumentError: naming the option.
    """
    if least <= value <= most and value % multiple == 0:
        return
    wanted = f"an integer from {least} to {most}"
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


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    where = f"te-hal compare: {option}"
    accepted = ", ".join(choices)
    if value not in choices:
        raise ArgumentError(where, got=repr(value), accepted=accepted, todo="choose one of these")
