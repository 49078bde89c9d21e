"""Whether a saved optimizer state can be taken over, decided before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_hal.optimizers.scaled_state import STATE_DTYPES, is_scaled
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from te_hal.optimizers.fused_optimizer import FusedOptimizer

_READABLE = (*STATE_DTYPES, torch.float64, torch.int16)


def check_layout(optimizer: FusedOptimizer, state_dict: object) -> None:
    """Check that it is an optimizer's state dict, and one whose groups have the settings of this kind of optimizer.

    Raises:
        CheckpointError: the first thing that is missing.
    """
    accepted, todo = "a dict with 'state' and 'param_groups'", "pass what state_dict() of such an optimizer returned"
    if not isinstance(state_dict, Mapping):
        raise _refused(optimizer, f"a {type(state_dict).__name__}", accepted, todo)
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        keys = ", ".join(map(repr, state_dict)) or "no keys"
        raise _refused(optimizer, f"a dict with {keys}", accepted, todo)
    if not all(isinstance(entry, Mapping) for entry in state.values()):
        raise _refused(optimizer, "a state that is no dict for each parameter", accepted, todo)
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), Sequence):
            raise _refused(optimizer, f"group {number} without 'params'", "groups with their parameters' numbers", todo)
        missing = [name for name in optimizer.saved_settings if name not in group]
        if missing:
            settings = [str(name) for name in group if name != "params"]
            got = f"group {number} without {', '.join(missing)}, but with {', '.join(settings) or 'nothing'}"
            todo = "load what this optimizer or its namesake in torch.optim saved; this is another kind's"
            raise _refused(optimizer, got, f"groups with {', '.join(optimizer.saved_settings)}", todo)
        for entry in [group, *(state[index] for index in group["params"] if index in state)]:
            step = entry.get("step", 0)
            one = isinstance(step, torch.Tensor) and step.numel() == 1
            if step is not None and not isinstance(step, (int, float)) and not one:
                raise _refused(optimizer, f"group {number} with step {step!r}", "a number of steps", todo)


def check_state(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any], given: Mapping[torch.Tensor, Mapping[str, Any]]
) -> list[int | None]:
    """Check names, shapes and dtypes of all states, and the number of steps of each group.

    Args:
        optimizer: that is to take them over.
        state_dict: all of it.
        given: its states by parameter.

    Returns:
        Steps done, by group; None where nothing says so, as before the first step.

    Raises:
        CheckpointError: the first thing that does not fit.
    """
    for number, (parameter, entry) in enumerate(given.items()):
        _check_entry(optimizer, f"parameter {number}", parameter, entry)
    steps = []
    for number, group in enumerate(state_dict["param_groups"]):
        entries = [state_dict["state"][index] for index in group["params"] if index in state_dict["state"]]
        found = {int(entry["step"]) for entry in entries if entry.get("step") is not None}
        found |= {int(group["step"])} if group.get("step") is not None else set()
        if len(found) > 1:
            got = f"group {number} with parameters after {', '.join(map(str, sorted(found)))} steps"
            raise _refused(optimizer, got, "one number of steps a group", "put them into groups by their steps")
        steps.append(found.pop() if found else None)
    return steps


def _check_entry(optimizer: FusedOptimizer, label: str, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
    known = {*optimizer.dtypes, *(f"{name}_scale_inv" for name in optimizer.dtypes), "step"}
    unknown = [str(name) for name in entry if name not in known]
    if unknown:
        todo = "load what this optimizer, with these arguments, or its namesake in torch.optim saved"
        raise _refused(optimizer, f"{label} with {', '.join(unknown)}", ", ".join(optimizer.dtypes), todo)
    for name in optimizer.dtypes:
        value, scale_inv = entry.get(name), entry.get(f"{name}_scale_inv")
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape != tuple(parameter.shape):
            got = f"{label}: {name} of shape {shape}"
            raise _refused(optimizer, got, f"shape {tuple(parameter.shape)}", "load into the same model")
        if value.dtype not in _READABLE:
            got = f"{label}: {name} of {value.dtype}"
            raise _refused(optimizer, got, ", ".join(map(str, _READABLE)), "save it again")
        remainder = name == "master_param" and optimizer.has_remainder(parameter)
        if (value.dtype == torch.int16) and not remainder:
            got = f"{label}: {name} as the 16 bits missing from a bf16 parameter"
            raise _refused(optimizer, got, "whole values", "use store_param_remainders=True")
        if value.dtype == torch.uint8 and scale_inv is None:
            raise _refused(optimizer, f"{label}: {name} without its scale", f"{name}_scale_inv", "save it again")
        if scale_inv is not None and (value.dtype not in STATE_DTYPES or not is_scaled(value.dtype)):
            raise _refused(optimizer, f"{label}: {name} of {value.dtype} with a scale", "none", "save it again")


def _refused(optimizer: FusedOptimizer, got: str, accepted: str, todo: str) -> CheckpointError:
    return CheckpointError(f"{type(optimizer).__name__}.load_state_dict", got=got, accepted=accepted, todo=todo)
