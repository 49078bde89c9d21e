"""What a comparison shows while it trains: moving bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from te_hal.cli.results import RunResult

# Step times jump; the median of this many makes a steady display.
_RECENT = 20
#: Seconds after which a line shows that it is still going on.
_QUIET = 20


class Reporter(Protocol):
    """Shows the steps of a run."""

    def start(self, result: RunResult) -> None:
        """A run starts, or goes on after `result.steps` steps."""

    def step(self, result: RunResult) -> None:
        """A step was done."""

    def note(self, message: str) -> None:
        """Something to know."""

    def close(self) -> None:
        """Nothing more comes."""


def make_reporter(console: Console, tokens: int) -> Reporter:
    """The display that fits the console.

    Args:
        console: where to show.
        tokens: predictions per step; a token is a byte.
    """
    return Bars(console, tokens) if console.is_terminal else Lines(console, tokens)


def _recent_seconds(result: RunResult) -> float:
    return median(result.step_seconds[-_RECENT:])


class Bars:
    """One bar per run, with loss, step time and tokens per second."""

    def __init__(self, console: Console, tokens: int) -> None:
        self._tokens = tokens
        self._progress = Progress(
            TextColumn("{task.description:8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=False,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def start(self, result: RunResult) -> None:
        """Add the run's bar."""
        self._task = self._progress.add_task(
            result.name, total=result.steps_planned, completed=result.steps, numbers="starting"
        )

    def step(self, result: RunResult) -> None:
        """Move the run's bar."""
        if self._task is None:
            return
        seconds = _recent_seconds(result)
        numbers = f"loss {result.loss[-1]:.3f}  {seconds * 1e3:5.1f} ms  {self._tokens / seconds:7,.0f} tok/s"
        self._progress.update(self._task, completed=result.steps, numbers=numbers)

    def note(self, message: str) -> None:
        """Print above the bars."""
        self._progress.console.print(message, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


class Lines:
    """A line at each evaluation, about ten per run, and after so many seconds without one."""

    def __init__(self, console: Console, tokens: int) -> None:
        self._console, self._tokens = console, tokens
        self._printed = time.monotonic()

    def start(self, result: RunResult) -> None:
        """Say which run starts, and where it goes on."""
        where = f", going on after step {result.steps}" if result.steps else ""
        self.note(f"{result.name}: {result.steps_planned} steps{where}")

    def step(self, result: RunResult) -> None:
        """Print a line if the step was evaluated, or none was printed for a while."""
        evaluated = bool(result.held_out) and result.held_out[-1][0] == result.steps
        if not evaluated and time.monotonic() - self._printed < _QUIET:
            return
        seconds = _recent_seconds(result)
        held_out = f"held-out {result.held_out_loss:.4f}  " if evaluated else ""
        self.note(
            f"{result.name:8} step {result.steps:5}/{result.steps_planned}  loss {result.loss[-1]:.4f}  "
            f"{held_out}{seconds * 1e3:.1f} ms/step  {self._tokens / seconds:,.0f} tokens/s"
        )

    def note(self, message: str) -> None:
        """Print a line."""
        self._printed = time.monotonic()
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Nothing to do."""
