"""Delayed-scaling state in checkpoints: what ``_extra_state`` of a module with FP8 gemms holds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from te_hal.modules.scaling import DIRECTIONS, Scaling
from te_hal.quantization import extra_state
from te_hal.quantization.scaling_state import DelayedScalingState, ScalingState
from te_hal.recipe import DelayedScaling, Format
from te_hal.schema.errors import CheckpointError, TeHalError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ARRAYS = {"scaling_fwd": ("scale_fwd", "amax_history_fwd"), "scaling_bwd": ("scale_bwd", "amax_history_bwd")}


def save_scaling(held: Mapping[str, Scaling]) -> torch.Tensor:
    """The ``_extra_state`` of a module: its delayed-scaling state, of no elements if it has none (or none with values).

    Args:
        held: the module's scaling state by recipe family.
    """
    scaling = held.get(DelayedScaling.family)
    states = {} if scaling is None else scaling.delayed_states()
    if scaling is None or any(state.device.type == "meta" for state in states.values()):
        return extra_state.empty()
    arrays: dict[str, torch.Tensor] = {}
    for key, (scale, history) in _ARRAYS.items():
        arrays[scale], arrays[history] = states[key].scale, states[key].amax_history
    # A derived class may have fields of its own; the state depends on these.
    fields = {field.name: getattr(scaling.recipe, field.name) for field in dataclasses.fields(DelayedScaling)}
    return extra_state.pack(extra_state.SavedState("DelayedScaling", fields, arrays))


def load_scaling(state: object, label: str, num_gemms: int = 1) -> Scaling | None:
    """The scaling state that an ``_extra_state`` holds, on the CPU; None for zero bytes.

    Args:
        state: what the checkpoint holds.
        label: the module's, for messages.
        num_gemms: the module's.

    Raises:
        CheckpointError: neither te_hal's nor Transformer Engine's, cut short, altered, or of another shape.
    """
    saved = extra_state.unpack(state, label)
    if saved is None:
        return None
    recipe = _saved_recipe(saved, label)
    states: dict[str, ScalingState] = {}
    for key, roles, forward in DIRECTIONS:
        fresh = DelayedScalingState(recipe, roles * num_gemms, forward=forward, device=torch.device("cpu"))
        fresh.load(*_checked_arrays(saved, key, fresh, label))
        states[key] = fresh
    return Scaling(recipe, (recipe, recipe.version), states)


def _saved_recipe(saved: extra_state.SavedState, label: str) -> DelayedScaling:
    """The saved recipe, as far as it can be written down: a callable becomes the default until autocast brings one."""
    if saved.recipe != "DelayedScaling":
        raise CheckpointError(
            f"{label}: _extra_state", got=f"recipe {saved.recipe}", accepted="DelayedScaling", todo="remove the entry"
        )
    fields = {k: v for k, v in saved.fields.items() if not (isinstance(v, str) and v.startswith("callable "))}
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
