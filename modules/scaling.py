"""Scaling: the scaling state of one module under one recipe, both directions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.quantization.scaling_state import (
    BACKWARD_ROLES,
    FORWARD_ROLES,
    DelayedScalingState,
    ScalingState,
    make_scaling_state,
)
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from te_hal.quantization import Quantizer
    from te_hal.recipe import Recipe

#: Key in ``fp8_meta`` and ``quantizers``, roles in slot order, and whether it is the forward direction.
DIRECTIONS = (("scaling_fwd", FORWARD_ROLES, True), ("scaling_bwd", BACKWARD_ROLES, False))


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling state of one recipe, by direction.

    Attributes:
        recipe: as it was when the state was built.
        source: the user's object it was built for, and its version then.
        states: ``scaling_fwd``, ``scaling_bwd``.
    """

    recipe: Recipe
    source: tuple[Recipe, int]
    states: dict[str, ScalingState]

    def serves(self, recipe: Recipe, device: torch.device) -> bool:
        """Whether the state is that of a recipe with these fields, on this device."""
        known, version = self.source
        unchanged = (recipe is known and recipe.version == version) or recipe == self.recipe
        return unchanged and all(
            not isinstance(state, DelayedScalingState) or state.scale.device == device for state in self.states.values()
        )

    def make_quantizers(self) -> dict[str, list[Quantizer]]:
        """Quantizers of both directions, in slot order; they share the state's memory."""
        return {key: state.make_quantizers() for key, state in self.states.items()}


def build_scaling(recipe: Recipe, device: torch.device, before: Scaling | None) -> Scaling:
    """New state for a recipe; takes over the history of an earlier state of its family.

    Args:
        recipe: the user's object.
        device: where state lives.
        before: the earlier state, if any.
    """
    # State made by a first forward in inference mode must be one that training can update.
    with torch.inference_mode(mode=False):
        states = {
            key: make_scaling_state(recipe, roles, forward=forward, device=device) for key, roles, forward in DIRECTIONS
        }
        if before is not None:
            _carry_over(before.states, states)
    return Scaling(copy.copy(recipe), (recipe, recipe.version), states)


def _carry_over(old: dict[str, ScalingState], new: dict[str, ScalingState]) -> None:
    """Keep histories; adapt scales to another margin or format (exact: the factor is a power of two)."""
    for key, state in new.items():
        before = old[key]
        if isinstance(state, DelayedScalingState) and isinstance(before, DelayedScalingState):
            state.adopt(before.scale, before.amax_history)
            factor = state.numerator / before.numerator
            if factor != 1.0:
                # A scale that no amax has moved yet is 1 under every margin and format.
                moved = (state.scale != 1.0) | (state.amax_history[1:] > 0).any(dim=0)
                adapted = (state.scale * factor).clamp(max=FLOAT32_MAX)
                state.scale.copy_(torch.where(moved, adapted, state.scale))
