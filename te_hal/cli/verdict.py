"""Whether FP8 can be trusted, judged from held-out losses and said in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.cli.observed import first_to_look_at
from te_hal.cli.precision import BASELINE, SECOND_SEED

if TYPE_CHECKING:
    from te_hal.cli.results import RunResult

#: FP8's held-out loss may be this share above BF16's.
TOLERANCE = 0.01
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


def noise(runs: list[RunResult]) -> float | None:
    """How far apart the held-out losses of the two BF16 seeds are, relative; None before both are done."""
    done = {run.name: run for run in runs if run.finished}
    if BASELINE not in done or SECOND_SEED not in done:
        return None
    return abs(difference(done[SECOND_SEED], done[BASELINE]))


def judge(runs: list[RunResult], unigram_loss: float) -> list[Verdict]:
    """One verdict per FP8 run; those that have not started are left out.

    Args:
        runs: finished or not, by the order of training.
        unigram_loss: held-out loss of predicting byte frequencies alone.
    """
    baseline = next((run for run in runs if run.name == BASELINE), None)
    if baseline is None:
        return []
    band = noise(runs)
    return [Verdict(run.name, *_judge(run, baseline, unigram_loss, band)) for run in runs if run.recipe is not None]


def _judge(run: RunResult, baseline: RunResult, unigram_loss: float, band: float | None) -> tuple[bool | None, str]:
    if run.nonfinite_values:
        return False, (
            f"not to be trusted here: {run.nonfinite_values} NaN or infinite values in {run.nonfinite_steps} of "
            f"{run.steps} steps, first in step {run.first_nonfinite_step}"
            + (f" (BF16 has them from step {baseline.first_nonfinite_step})." if baseline.nonfinite_values else ".")
            + _where_nonfinite(run)
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
    seeds = "" if band is None else f"; two BF16 seeds differ by {band:.2%}"
    if above <= TOLERANCE:
        return True, f"follows BF16: {numbers} (limit {TOLERANCE:.0%} above{seeds}), no NaN or Inf."
    return False, f"falls behind BF16: {numbers}, more than the {TOLERANCE:.0%} allowed{seeds}.{_where_behind(run)}"


def _where_nonfinite(run: RunResult) -> str:
    found = (run.observed or {}).get("nonfinite")
    if found is None:
        return ""
    place = f"{found['module']} ({found['kind']}), {found['role']}, {found['op']} in {found['direction']}"
    return f" Look first at {place}: {found['value']} in step {found['step']}."


def _where_behind(run: RunResult) -> str:
    place = first_to_look_at(run.observed)
    if place is None:
        return ""
    return (
        f" Look first at {place.module}, {place.role}: {place.clipped:.2%} of its values were clipped, "
        f"{place.flushed:.2%} flushed to zero."
    )
