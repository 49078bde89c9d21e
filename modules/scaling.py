"""Scaling: the scaling state of one module under one recipe, both directions."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from te_hal.quantization.custom_state import CustomScalingState
from te_hal.quantization.factory_answers import ask_factory, factory_snapshot, same_answers
from te_hal.quantization.hybrid_quantizer import HybridQuantizer
from te_hal.quantization.scaling_state import (
    BACKWARD_ROLES,
    FORWARD_ROLES,
    DelayedScalingState,
    ScalingState,
    make_scaling_state,
)
from te_hal.quantization.unquantized import IdentityQuantizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from te_hal.quantization import Quantizer
    from te_hal.quantization.factory_answers import Answer
    from te_hal.quantization.quantizer_role import SlotRoles
    from te_hal.recipe import CustomRecipe, Recipe

#: Key in ``fp8_meta`` and ``quantizers``, roles of one gemm in slot order, and whether it is the forward direction.
DIRECTIONS = (("scaling_fwd", FORWARD_ROLES, True), ("scaling_bwd", BACKWARD_ROLES, False))


class Asked(NamedTuple):
    """What a factory's answers depend on: itself and what it refers to, and the roles it is asked about."""

    factory: tuple[object, ...]
    roles: Mapping[str, SlotRoles]

    def __reduce__(self) -> tuple[object, ...]:
        """Identities do not survive pickling: a copy's factory is asked again."""
        return Asked, ((), {})


def factory_of(recipe: CustomRecipe) -> tuple[object, ...]:
    """What tells a recipe's factory from another one: its key, or else what it refers to."""
    if recipe.qfactory_key is not None:
        return (recipe.qfactory_key,)
    return factory_snapshot(recipe.qfactory)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling state of one recipe, by direction.

    Attributes:
        recipe: as it was when the state was built.
        source: the user's object it was built for, and its version then.
        states: ``scaling_fwd``, ``scaling_bwd``.
        asked: under CustomRecipe: what its factory was asked with (:class:`Asked`).
    """

    recipe: Recipe
    source: tuple[Recipe, int]
    states: Mapping[str, ScalingState | CustomScalingState]
    asked: Asked | None = None

    def serves(self, recipe: Recipe, device: torch.device, asked: Asked | None = None) -> bool:
        """Whether the state is that of a recipe with these fields and answers, on this device."""
        known, version = self.source
        unchanged = (recipe is known and recipe.version == version) or recipe == self.recipe
        if not unchanged or asked != self.asked:
            return False
        return all(not (state.delayed is not None and state.delayed.device != device) for state in self.states.values())

    def delayed_states(self) -> dict[str, DelayedScalingState]:
        """Those of delayed scaling, which live on a device and are saved; none under another recipe."""
        return {key: state.delayed for key, state in self.states.items() if state.delayed is not None}

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
        states = before.states  # type: ignore[assignment] # CustomRecipe's are built elsewhere
        for state in states.values():
            state.adapt(recipe, device)  # type: ignore[arg-type] # a recipe of the state's family
    return Scaling(copy.copy(recipe), (recipe, recipe.version), states)


def build_custom_scaling(
    recipe: CustomRecipe, slot_roles: Mapping[str, SlotRoles], device: torch.device, label: str
) -> Scaling:
    """State and quantizers as the recipe's factory wants them; nothing that exists changes.

    Args:
        recipe: the user's object.
        slot_roles: what the factory is asked about.
        device: where state lives.
        label: the module's, for messages.

    Raises:
        ArgumentError: answers that cannot serve.
    """
    answers = ask_factory(recipe.qfactory, slot_roles, label)
    if recipe.backward_override is not None:
        answers["scaling_fwd"] = tuple(map(_of_fprop, answers["scaling_fwd"]))
        answers["scaling_bwd"] = tuple(IdentityQuantizer() for _ in answers["scaling_bwd"])
    states: dict[str, ScalingState | CustomScalingState] = {}
    for key, roles, forward in DIRECTIONS:
        of_slots = roles * (len(answers[key]) // len(roles))
        states[key] = CustomScalingState(answers[key], of_slots, forward=forward, device=device)
    # Looked at afterwards: a factory may keep a record of what it was asked.
    asked = Asked(factory_of(recipe), slot_roles)
    return Scaling(copy.copy(recipe), (recipe, recipe.version), states, asked)


def _of_fprop(answer: Answer) -> Answer:
    """What fprop needs of an answer: the backward reads no codes."""
    return answer.rowwise_quantizer if isinstance(answer, HybridQuantizer) else answer


def quantizes_alike(held: Scaling, made: Scaling, device: torch.device) -> bool:
    """Whether a custom scaling that is in use can stay in place of one that was made now, for this device."""
    for key, state in made.states.items():
        known = held.states[key]
        if not (isinstance(state, CustomScalingState) and isinstance(known, CustomScalingState)):
            return False
        if known.delayed is not None and known.delayed.device != device:
            return False
        if not same_answers(known.answers, state.answers):
            return False
    return True


def take_over(scaling: Scaling, before: Scaling | None, device: torch.device) -> None:
    """Have a new custom scaling go on with an earlier one's delayed-scaling state, where the same slots have it.

    Raises:
        StateError: the earlier one was loaded and belongs to other slots.
    """
    for key, state in scaling.states.items():
        earlier = None if before is None else before.states[key]
        if isinstance(state, CustomScalingState) and isinstance(earlier, CustomScalingState):
            state.take_over(earlier, device)


def told_apart(before: Recipe, after: Recipe) -> tuple[str, str]:
    """Two recipes in short: their classes, and where these are one the fields that differ."""
    if type(before) is not type(after):
        return type(before).__name__, type(after).__name__
    names = [field.name for field in dataclasses.fields(before)]
    differing = [name for name in names if getattr(before, name) != getattr(after, name)]
    texts = [", ".join(f"{name}={getattr(recipe, name)!r}" for name in differing) for recipe in (before, after)]
    kind = type(before).__name__
    return f"{kind}({texts[0]})", f"{kind}({texts[1]})"
