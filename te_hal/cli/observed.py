"""What te_hal.monitor has recorded of a run: put together across checkpoints, and read for the report."""

from __future__ import annotations

from statistics import fmean
from typing import Any, NamedTuple

_ROLES = ("input", "weight", "grad_output")
_COLUMNS = ("steps", "amax", "scale", "clipped", "flushed")

#: A role that clips more than this share of its values is looked at before any that flushes.
_MANY_CLIPPED = 1e-3


class Lost(NamedTuple):
    """What the format cut off at one place, as mean shares over the second half of the observed steps.

    Attributes:
        module: its name in the model.
        role: "input", "weight", "grad_output", ...
        clipped: share of values beyond the format's range.
        flushed: share of values that became zero.
    """

    module: str
    role: str
    clipped: float
    flushed: float


def joined(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Two histories of one run, one after the other."""
    if before is None:
        return after
    tensors = {(entry["module"], entry["role"]): dict(entry) for entry in before["tensors"]}
    for entry in after["tensors"]:
        known = tensors.setdefault((entry["module"], entry["role"]), {**entry, **{name: [] for name in _COLUMNS}})
        known.update({name: [*known[name], *entry[name]] for name in _COLUMNS})
    return {
        **after,
        "steps": [*before["steps"], *after["steps"]],
        "gradient_norm": [*before["gradient_norm"], *after["gradient_norm"]],
        "tensors": list(tensors.values()),
        "nonfinite": before["nonfinite"] or after["nonfinite"],
    }


def losses_of_format(observed: dict[str, Any] | None) -> list[Lost]:
    """What was cut off at each place that quantizes: by role, and in the order of the model's modules."""
    places = []
    for entry in (observed or {}).get("tensors", []):
        half = len(entry["steps"]) // 2
        clipped, flushed = ([share for share in entry[name][half:] if share is not None] for name in _COLUMNS[3:])
        if clipped:
            places.append(Lost(entry["module"], entry["role"], fmean(clipped), fmean(flushed)))
    # Roles that the first module has not come at their place in the order all the same.
    return sorted(places, key=lambda place: _ROLES.index(place.role) if place.role in _ROLES else len(_ROLES))


def first_to_look_at(observed: dict[str, Any] | None) -> Lost | None:
    """Where the format cuts off most: where most is clipped if that is much, else where most is flushed."""
    places = losses_of_format(observed)
    if not places:
        return None
    worst = max(places, key=lambda place: place.clipped)
    return worst if worst.clipped > _MANY_CLIPPED else max(places, key=lambda place: place.flushed)
