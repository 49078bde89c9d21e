"""All that a report, a record or a plot of a comparison is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from te_hal.cli.verdict import Verdict, judge

if TYPE_CHECKING:
    from te_hal.cli.results import RunResult
    from te_hal.cli.text import Text


@dataclass(frozen=True)
class Summary:
    """A comparison at its end, or where it was stopped.

    Attributes:
        identity: its configuration, by name.
        machine: what it ran on, by name.
        text: what it trained on.
        tokens: predictions per step.
        runs: in order; at least one, the first being BF16.
        finished: whether all runs are done.
    """

    identity: dict[str, Any]
    machine: dict[str, Any]
    text: Text
    tokens: int
    runs: list[RunResult]
    finished: bool

    @cached_property
    def unigram_loss(self) -> float:
        """Held-out loss of predicting byte frequencies alone."""
        return self.text.unigram_loss()

    @property
    def prompt(self) -> str:
        """What the models were given to go on from."""
        return bytes(self.text.prompt(self.identity["sequence"]).tolist()).decode(errors="replace")

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """One per FP8 run that has started."""
        return judge(self.runs, self.unigram_loss)
