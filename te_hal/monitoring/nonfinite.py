"""The first NaN or Inf of a training: where it is, and what to do about it."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.errors import TeHalError

if TYPE_CHECKING:
    from te_hal.monitoring.statistics import Statistics

IGNORE, REPORT, RAISE = "ignore", "report", "raise"
MODES = (IGNORE, REPORT, RAISE)


class NonFiniteError(TeHalError, ArithmeticError):
    """A monitored model has a NaN or Inf, and its monitor was asked to raise."""


class NonFiniteWarning(RuntimeWarning):
    """A monitored model had a NaN or Inf; given once per monitor."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is.

    Attributes:
        module: the module's name in the model, with that of its product where it has several; "" for the model itself.
        kind: its class.
        role: "input", "weight", "output", "grad_output", "gradient of <parameter>", ...
        op: what takes the tensor in (input, weight, grad_output) or has made it (output, gradients of parameters).
        direction: "forward" or "backward".
    """

    module: str
    kind: str
    role: str
    op: str
    direction: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.kind}), {self.role}, {self.op} in {self.direction}"


class Guard:
    """Watches for the first NaN or Inf.

    Args:
        mode: "raise" looks at each tensor at once. "report" looks at the end of a step, so that a device is waited for
            once per step; it warns once. "ignore" does nothing.

    Attributes:
        found: the first one as plain data, or None.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._seen: list[tuple[Place, torch.Tensor]] = []
        self.found: dict[str, Any] | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to watch for: the first one ends it."""
        return self._mode != IGNORE and self.found is None

    def look(self, place: Place, statistics: Statistics, step: int) -> None:
        """Note a tensor.

        Raises:
            NonFiniteError: under "raise", it is not finite.
        """
        if not self.active:
            return
        if self._mode == REPORT:
            self._seen.append((place, statistics.amax))
        elif not statistics.amax.isfinite():
            self._tell(place, statistics.amax, step)

    def end_step(self, step: int) -> None:
        """Look at what was noted, in the order in which it came."""
        seen, self._seen = self._seen, []
        if not seen or not self.active:
            return
        device = seen[0][1].device
        finite = torch.stack([amax.to(device) for _, amax in seen]).isfinite().tolist()
        first = next((pair for pair, good in zip(seen, finite, strict=True) if not good), None)
        if first is not None:
            self._tell(*first, step)

    def _tell(self, place: Place, amax: torch.Tensor, step: int) -> None:
        what = "NaN" if amax.isnan() else "Inf"
        self.found = {"step": step, "value": what, **asdict(place)}
        if self._mode == RAISE:
            raise NonFiniteError(
                f"te_hal.monitor: {place}",
                got=f"{what} in step {step}",
                accepted="finite values",
                todo="look at what feeds this tensor, at its scale and clipped share before this step, and at the "
                "learning rate; run this layer inside te.autocast(enabled=False) to see whether FP8 is the cause",
            )
        warnings.warn(
            f"te_hal.monitor: first {what} in step {step}: {place}; Monitor.nonfinite has the facts",
            NonFiniteWarning,
            stacklevel=4,
        )
