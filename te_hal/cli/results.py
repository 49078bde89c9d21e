"""What a run produced: series per step, held-out losses, memory, and the few numbers made from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

#: Training losses of this many last steps make the loss in the table; one batch's loss is noisy.
LAST_STEPS = 20


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step of a run needs; see te_hal.cli.memory for how they are measured.

    Attributes:
        parameter_bytes: parameters.
        optimizer_bytes: fp32 masters and moments.
        saved_activation_bytes: what forward keeps for backward and grows with the batch.
        saved_other_bytes: what forward keeps beside that and the parameters, such as FP8 copies of weights.
        saved_by_part: saved_activation_bytes by part of the model, and "elsewhere" for the rest.
        peak_bytes: the most that is held at once during a step.
        method: how peak_bytes was measured.
    """

    parameter_bytes: int
    optimizer_bytes: int
    saved_activation_bytes: int
    saved_other_bytes: int
    saved_by_part: dict[str, int]
    peak_bytes: int
    method: str


@dataclass
class RunResult:
    """A finished or partial run. Every series has one entry per step done.

    Attributes:
        name: of the run; see te_hal.cli.precision.
        recipe: the recipe with its fields, or None.
        steps_planned: how many steps the run was to have.
        loss: training loss, nats per byte.
        gradient_norm: L2 norm before clipping.
        learning_rate: that of the step.
        step_seconds: wall time of the step, evaluation excluded.
        held_out: pairs of a step count and the held-out loss, nats per byte, after that many steps.
        nonfinite_values: NaN and infinite losses and gradient elements over all steps.
        nonfinite_steps: steps that had any.
        first_nonfinite_step: the first of them, counted from 1, or None.
        memory: bytes of a step, or None before they were measured.
        observed: what te_hal.monitor has recorded (docs/monitor.md), or None before the first checkpoint.
        sample: what the finished model wrote.
    """

    name: str
    recipe: str | None
    steps_planned: int
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    nonfinite_values: int = 0
    nonfinite_steps: int = 0
    first_nonfinite_step: int | None = None
    memory: Memory | None = None
    observed: dict[str, Any] | None = None
    sample: str = ""

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.loss)

    @property
    def finished(self) -> bool:
        """Whether all planned steps are done."""
        return self.steps >= self.steps_planned

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last LAST_STEPS steps; NaN before the first."""
        return fmean(self.loss[-LAST_STEPS:]) if self.loss else math.nan

    @property
    def held_out_loss(self) -> float:
        """Newest held-out loss; NaN before the first evaluation."""
        return self.held_out[-1][1] if self.held_out else math.nan

    @property
    def last_gradient_norm(self) -> float:
        """Mean gradient norm of the last LAST_STEPS steps; NaN before the first."""
        return fmean(self.gradient_norm[-LAST_STEPS:]) if self.gradient_norm else math.nan

    @property
    def median_step_seconds(self) -> float:
        """Median wall time of a step; NaN before the first."""
        return median(self.step_seconds) if self.step_seconds else math.nan

    def record(self, *, loss: float, gradient_norm: float, lr: float, seconds: float, nonfinite: int) -> None:
        """Append a step; `nonfinite` counts the gradient elements that were NaN or infinite."""
        self.loss.append(loss)
        self.gradient_norm.append(gradient_norm)
        self.learning_rate.append(lr)
        self.step_seconds.append(seconds)
        nonfinite += not math.isfinite(loss)
        if nonfinite:
            self.nonfinite_values += nonfinite
            self.nonfinite_steps += 1
            self.first_nonfinite_step = self.first_nonfinite_step or self.steps

    def as_dict(self) -> dict[str, Any]:
        """Plain containers and numbers; `from_dict` takes them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """The result that `as_dict` described."""
        memory = fields["memory"]
        return cls(**{**fields, "memory": Memory(**memory) if memory else None})
