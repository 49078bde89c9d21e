"""Delayed-scaling state in checkpoints: what ``_extra_state`` of a module with FP8 gemms holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from te_hal.modules.scaling import DIRECTIONS, Scaling
from te_hal.quantization import extra_state
from te_hal.quantization.custom_state import CustomScalingState
from te_hal.quantization.scaling_state import DelayedScalingState, ScalingState
from te_hal.recipe import CustomRecipe, DelayedScaling, Format
from te_hal.schema.errors import CheckpointError, TeHalError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARRAYS = {"scaling_fwd": ("scale_fwd", "amax_history_fwd"), "scaling_bwd": ("scale_bwd", "amax_history_bwd")}


def save_scaling(held: Mapping[str, Scaling], in_use: str | None) -> torch.Tensor:
    """The ``_extra_state`` of a module: its delayed-scaling state, of no elements if it has none (or none with values).

    Where DelayedScaling and a CustomRecipe have left one each, that of the family in use is saved.

    Args:
        held: the module's scaling state by recipe family.
        in_use: the family in use.
    """
    families = sorted((DelayedScaling.family, CustomRecipe.family), key=lambda family: family != in_use)
    scaling = next((held[family] for family in families if family in held and held[family].delayed_states()), None)
    states = {} if scaling is None else scaling.delayed_states()
    if scaling is None or any(state.device.type == "meta" for state in states.values()):
        return extra_state.empty()
    arrays: dict[str, torch.Tensor] = {}
    for key, state in states.items():
        scale, history = _ARRAYS[key]
        arrays[scale], arrays[history] = state.scale, state.amax_history
    recipe = next(iter(states.values())).recipe
    # A derived class may have fields of its own; the state depends on these.
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(DelayedScaling)}
    if scaling.recipe.custom():
        slots = {key: list(state.slots) for key, state in scaling.states.items()}  # type: ignore[union-attr] # custom ones
        return extra_state.pack(extra_state.SavedState("CustomRecipe", {**fields, "slots": slots}, arrays))
    return extra_state.pack(extra_state.SavedState("DelayedScaling", fields, arrays))


def load_scaling(state: object, label: str, num_gemms: int = 1) -> Scaling | None:
    """The scaling state that an ``_extra_state`` holds, on the CPU; None for zero bytes.

    Args:
        state: what the checkpoint holds.
        label: the module's, for messages.
        num_gemms: the module's.

    Returns:
        That of DelayedScaling; of a CustomRecipe what waits for its factory.

    Raises:
        CheckpointError: neither te_hal's nor Transformer Engine's, cut short, altered, or of another shape.
    """
    saved = extra_state.unpack(state, label)
    if saved is None:
        return None
    recipe = _saved_recipe(saved, label)
    if saved.recipe == "CustomRecipe":
        return _load_custom(saved, recipe, label, num_gemms)
    states: dict[str, ScalingState] = {}
    for key, roles, forward in DIRECTIONS:
        fresh = DelayedScalingState(recipe, roles * num_gemms, forward=forward, device=torch.device("cpu"))
        fresh.load(*_checked_arrays(saved, key, fresh, label))
        states[key] = fresh
    return Scaling(recipe, (recipe, recipe.version), states)


def _load_custom(saved: extra_state.SavedState, recipe: DelayedScaling, label: str, num_gemms: int) -> Scaling:
    states: dict[str, CustomScalingState] = {}
    for key, roles, forward in DIRECTIONS:
        slots, fresh = _saved_slots(saved, key, len(roles) * num_gemms, label), None
        if slots:
            of_slots = [(roles * num_gemms)[slot] for slot in slots]
            fresh = DelayedScalingState(recipe, of_slots, forward=forward, device=torch.device("cpu"))
            fresh.load(*_checked_arrays(saved, key, fresh, label))
        states[key] = CustomScalingState.loaded(fresh, slots, forward=forward)
    unknown = CustomRecipe(qfactory=_factory_of_a_checkpoint)
    return Scaling(unknown, (unknown, unknown.version), states)


def _saved_slots(saved: extra_state.SavedState, key: str, count: int, label: str) -> list[int]:
    known = saved.fields.get("slots")
    slots = known.get(key) if isinstance(known, dict) else None
    if not isinstance(slots, list) or not all(type(slot) is int and 0 <= slot < count for slot in slots):
        raise CheckpointError(
            f"{label}: _extra_state",
            got=f"slots {slots!r} of {key}",
            accepted=f"a list of numbers below {count}",
            todo="load a checkpoint of the same module",
        )
    return slots


def _factory_of_a_checkpoint(role: object) -> None:
    """Stands for the factory that a checkpoint cannot hold; a module in use has its own."""


def _saved_recipe(saved: extra_state.SavedState, label: str) -> DelayedScaling:
    """The saved recipe, as far as it can be written down: a callable becomes the default until autocast brings one."""
    if saved.recipe not in ("DelayedScaling", "CustomRecipe"):
        raise CheckpointError(
            f"{label}: _extra_state",
            got=f"recipe {saved.recipe}",
            accepted="DelayedScaling, CustomRecipe",
            todo="remove the entry",
        )
    written = {k: v for k, v in saved.fields.items() if not (isinstance(v, str) and v.startswith("callable "))}
    fields = {k: v for k, v in written.items() if k != "slots" or saved.recipe == "DelayedScaling"}
    try:
        return DelayedScaling(**{**fields, "fp8_format": Format[fields["fp8_format"]]})
    except (KeyError, TypeError, TeHalError) as error:
        raise CheckpointError(
            f"{label}: _extra_state",
            got=f"recipe fields {saved.fields}",
            accepted="fields of DelayedScaling",
            todo="save again with this version",
        ) from error


def _checked_arrays(
    saved: extra_state.SavedState, key: str, fresh: DelayedScalingState, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    scale_name, history_name = _ARRAYS[key]
    wanted = {scale_name: tuple(fresh.scale.shape), history_name: tuple(fresh.amax_history.shape)}
    for name, shape in wanted.items():
        got = tuple(saved.arrays[name].shape) if name in saved.arrays else None
        if got != shape:
            raise CheckpointError(
                f"{label}: _extra_state",
                got=f"{name} of shape {got}",
                accepted=f"shape {shape}",
                todo="load a checkpoint of the same module",
            )
    return saved.arrays[scale_name], saved.arrays[history_name]
