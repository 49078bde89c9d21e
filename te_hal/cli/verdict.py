"""Whether FP8 can be trusted, judged from held-out losses and said in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.cli.precision import BASELINE

if TYPE_CHECKING:
    from te_hal.cli.results import RunResult

#: FP8's held-out loss may be this share above BF16's.
TOLERANCE = 0.02
#: BF16 must be this share below the byte frequencies' loss before a comparison says anything.
_LEARNED = 0.1


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one recipe.

    Attributes:
        name: of the recipe's run.
        trusted: yes, no, or None where it cannot be told.
        sentence: the judgement with its numbers.
    """

    name: str
    trusted: bool | None
    sentence: str


def difference(run: RunResult, baseline: RunResult) -> float:
    """Held-out loss of `run` relative to that of `baseline`; 0.01 is one percent above."""
    return run.held_out_loss / baseline.held_out_loss - 1


def judge(runs: list[RunResult], unigram_loss: float) -> list[Verdict]:
    """One verdict per FP8 run; those that have not started are left out.

    Args:
        runs: finished or not, by the order of training.
        unigram_loss: held-out loss of predicting byte frequencies alone.
    """
    baseline = next((run for run in runs if run.name == BASELINE), None)
    if baseline is None:
        return []
    return [Verdict(run.name, *_judge(run, baseline, unigram_loss)) for run in runs if run.recipe is not None]


def _judge(run: RunResult, baseline: RunResult, unigram_loss: float) -> tuple[bool | None, str]:
    if run.nonfinite_values:
        return False, (
            f"not to be trusted here: {run.nonfinite_values} NaN or infinite values in {run.nonfinite_steps} of "
            f"{run.steps} steps, first in step {run.first_nonfinite_step}"
            + (f" (BF16 has them from step {baseline.first_nonfinite_step})." if baseline.nonfinite_values else ".")
        )
    if not run.finished:
        return None, f"cannot be told yet: stopped after {run.steps} of {run.steps_planned} steps."
    if not math.isfinite(baseline.held_out_loss):
        return None, "cannot be told: BF16 itself has no finite held-out loss."
    if not baseline.held_out_loss < (1 - _LEARNED) * unigram_loss:
        return None, (
            f"cannot be told: BF16 learned too little (held-out loss {baseline.held_out_loss:.3f}, byte frequencies "
            f"alone give {unigram_loss:.3f}); train longer."
        )
    above = difference(run, baseline)
    numbers = f"held-out loss {run.held_out_loss:.4f}, {abs(above):.2%} {'above' if above > 0 else 'below'} BF16's"
    if above <= TOLERANCE:
        return True, f"follows BF16: {numbers} (limit {TOLERANCE:.0%} above), no NaN or Inf."
    return False, f"falls behind BF16: {numbers}, more than the {TOLERANCE:.0%} allowed."
