"""QuantizerRequest: what a factory of CustomRecipe returns where the module has to make the quantizer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from te_hal.recipe import DelayedScaling, Format

if TYPE_CHECKING:
    from te_hal.recipe.delayed_scaling import AmaxAlgo, ScaleAlgo


class QuantizerRequest:
    """Base of requests for a quantizer over state that the module keeps."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for a Float8Quantizer over the module's delayed-scaling state. The fields are DelayedScaling's.

    All requests of a module must be equal: they share one state.

    Raises:
        ArgumentError: as DelayedScaling.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgo = "max"
    scaling_factor_compute_algo: ScaleAlgo | None = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        self.recipe()

    def recipe(self) -> DelayedScaling:
        """The recipe whose state serves the request."""
        return DelayedScaling(**{field.name: getattr(self, field.name) for field in fields(self)})
