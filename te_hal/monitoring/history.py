"""The numbers of all observed steps, by module and role, as plain data."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from te_hal.monitoring.statistics import combine

if TYPE_CHECKING:
    from te_hal.monitoring.statistics import Statistics

    Key = tuple[str, str]


class History:
    """Collects the statistics of a step and turns them into numbers when it ends."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gradient_norm: list[float] = []
        self._series: dict[Key, dict[str, Any]] = {}
        self._now: dict[Key, list[Statistics]] = {}

    def add(self, module: str, role: str, statistics: Statistics) -> None:
        """Statistics of the step under way."""
        self._now.setdefault((module, role), []).append(statistics)

    def end_step(self, step: int, gradient_norm: float) -> None:
        """Add a column of numbers for everything that was seen since the step before."""
        self.steps.append(step)
        self.gradient_norm.append(gradient_norm)
        for key, parts in self._now.items():
            self._append(key, step, combine(parts))
        self._now = {}

    def discard_step(self) -> None:
        """Forget what was seen since the step before."""
        self._now = {}

    def _append(self, key: Key, step: int, seen: Statistics) -> None:
        series = self._series.get(key)
        if series is None:
            columns: dict[str, list[Any]] = {name: [] for name in ("steps", "amax", "scale", "clipped", "flushed")}
            series = self._series[key] = {"module": key[0], "role": key[1], "basis": seen.basis, **columns}
        if seen.basis == "codes":
            series["basis"] = "codes"
        series["steps"].append(step)
        series["amax"].append(seen.amax.item())
        series["scale"].append(None if seen.scale is None else seen.scale.item())
        series["clipped"].append(None if seen.clipped is None else seen.clipped.item() / seen.values)
        series["flushed"].append(None if seen.flushed is None else seen.flushed.item() / seen.values)

    def tensors(self) -> list[dict[str, Any]]:
        """One entry per module and role, in the order in which they were first seen; a copy."""
        return copy.deepcopy(list(self._series.values()))
