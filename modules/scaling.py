"""Scaling: the scaling state of one module under one recipe, both directions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.quantization.scaling_state import (
    BACKWARD_ROLES,
    FORWARD_ROLES,
    DelayedScalingState,
    ScalingState,
    make_scaling_state,
)

if TYPE_CHECKING:
    import torch

    from te_hal.quantization import Quantizer
    from te_hal.recipe import Recipe

#: Key in ``fp8_meta`` and ``quantizers``, roles of one gemm in slot order, and whether it is the forward direction.
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
        if not unchanged:
            return False
        for state in self.states.values():  # asked with every forward
            if isinstance(state, DelayedScalingState) and state.device != device:
                return False
        return True

    def delayed_states(self) -> dict[str, DelayedScalingState]:
        """Those of delayed scaling, which live on a device and are saved; none under another recipe."""
        return {key: state for key, state in self.states.items() if isinstance(state, DelayedScalingState)}

    def make_quantizers(self) -> dict[str, list[Quantizer]]:
        """Quantizers of both directions, in slot order; they share the state's memory."""
        return {key: state.make_quantizers() for key, state in self.states.items()}


def build_scaling(recipe: Recipe, device: torch.device, before: Scaling | None, num_gemms: int = 1) -> Scaling:
    """State for a recipe: new, or that of an earlier recipe of its family, adapted in place.

    Adapted, because a graph whose backward is still to come records into the earlier state.

    Args:
        recipe: the user's object.
        device: where state lives.
        before: the earlier state, if any.
        num_gemms: products of the module; each has a slot of every role.
    """
    if before is None:
        states = {
            key: make_scaling_state(recipe, roles * num_gemms, forward=forward, device=device)
            for key, roles, forward in DIRECTIONS
        }
    else:
        states = before.states
        for state in states.values():
            state.adapt(recipe, device)  # type: ignore[arg-type] # a recipe of the state's family
    return Scaling(copy.copy(recipe), (recipe, recipe.version), states)
