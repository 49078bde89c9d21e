"""DelayedScaling: one scale per tensor, from the amax of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import Recipe, check_format, check_is, check_number, refuse_attention
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ElementFormat, ScalingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    AmaxAlgo = str | Callable[[torch.Tensor], torch.Tensor]
    ScaleAlgo = Callable[[torch.Tensor, torch.Tensor, float, Recipe], torch.Tensor]

_ALGOS = ("max", "most_recent")

#: Beyond this, ``fp8_max * 2**-margin`` leaves fp32's normal range: scales of 0 or infinity, and NaN behind them.
_LARGEST_MARGIN = 100


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """Delayed scaling (docs/numerics.md, D1-D4).

    Attributes:
        margin: scales are divided by ``2**margin``; from -100 to 100.
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 backward) or ``Format.E4M3``.
        amax_history_len: rows of the history, the running one included.
        amax_compute_algo: ``"max"`` over the window, ``"most_recent"``, or a callable
            ``(amax_history[L, n]) -> amax[n]``. With a callable the history rolls at every update, zero amax too.
        scaling_factor_compute_algo: callable ``(amax[n], old_scale[n], fp8_max, recipe) -> scale[n]``, or None.
        reduce_amax: take amax over the group that autocast names. Several processes are refused for now.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: must be None, as in Transformer Engine.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgo = "max"
    scaling_factor_compute_algo: ScaleAlgo | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    family: ClassVar[str] = "delayed"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.TENSOR

    def _validate(self) -> None:
        check_number(self, "margin", self.margin, (int,), -_LARGEST_MARGIN, _LARGEST_MARGIN)
        check_number(self, "amax_history_len", self.amax_history_len, (int,), 1)
        check_is(self, "reduce_amax", self.reduce_amax, bool)
        check_format(self, self.fp8_format)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        if self.amax_compute_algo not in _ALGOS and not callable(self.amax_compute_algo):
            raise ArgumentError(
                "DelayedScaling.amax_compute_algo",
                got=repr(self.amax_compute_algo),
                accepted="'max', 'most_recent' or a callable",
                todo="correct the field",
            )
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise ArgumentError(
                "DelayedScaling.scaling_factor_compute_algo",
                got=repr(self.scaling_factor_compute_algo),
                accepted="None or a callable",
                todo="correct the field",
            )
        if self.backward_override is not None:
            raise ArgumentError(
                "DelayedScaling.backward_override",
                got=repr(self.backward_override),
                accepted="None: delayed scaling keeps state that an overridden backward would starve",
                todo="use Float8CurrentScaling for an overridden backward",
            )

    @property
    def updates_by_op(self) -> bool:
        """Whether the op ``update_delayed_scale`` renews scales; a user's callables go another way."""
        return isinstance(self.amax_compute_algo, str) and self.scaling_factor_compute_algo is None

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""
        return self.fp8_format.element_format(forward=forward)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, margin={self.margin}, format={self.fp8_format.name}, "
            f"amax_history_len={self.amax_history_len}, amax_compute_algo={self.amax_compute_algo}, "
            f"reduce_amax={self.reduce_amax}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}, "
            f"backward_override={self.backward_override}"
        )
