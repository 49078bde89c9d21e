"""The table and the words at the end of a comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from te_hal.cli.report_details import print_details
from te_hal.cli.results import LAST_STEPS
from te_hal.cli.verdict import difference, noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

_MIB = 2**20
_UNKNOWN = "-"
_COLORS = {True: "green", False: "red", None: "yellow"}

#: Heading of each column, and the cell of a run.
_COLUMNS: tuple[tuple[str, Callable[[RunResult, Summary], str]], ...] = (
    ("train\nloss", lambda run, _: _number(run.last_loss, ".4f")),
    ("held-out\nloss", lambda run, _: _number(run.held_out_loss, ".4f")),
    ("vs\nBF16", lambda run, summary: _relative(run, summary.runs[0])),
    ("grad\nnorm", lambda run, _: _number(run.last_gradient_norm, ".3g")),
    ("ms/\nstep", lambda run, _: _number(run.median_step_seconds * 1e3, ".1f")),
    ("tokens\n/s", lambda run, summary: _number(summary.tokens / run.median_step_seconds, ",.0f")),
    ("peak\nMiB", lambda run, _: _mebibytes(run.memory.peak_bytes if run.memory else None)),
    ("saved\nMiB", lambda run, _: _mebibytes(run.memory.saved_activation_bytes if run.memory else None)),
    ("NaN/\nInf", lambda run, _: f"{run.nonfinite_values}"),
)


def print_report(console: Console, summary: Summary) -> None:
    """Print the tables, what their columns mean, what the models write, and the verdicts; 80 columns are enough."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nrun", no_wrap=True)
    for heading, _ in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in summary.runs:
        name = run.name if run.finished else f"{run.name}\n{run.steps}/{run.steps_planned}"
        table.add_row(name, *(cell(run, summary) for _, cell in _COLUMNS))
    console.print(table)
    console.print("\n".join(_notes(summary)), style="dim", highlight=False, markup=False)
    print_details(console, summary)
    console.print()
    for verdict in summary.verdicts:
        color = _COLORS[verdict.trusted]
        console.print(f"[bold {color}]{verdict.name}[/] {verdict.sentence}", highlight=False)


def _notes(summary: Summary) -> list[str]:
    memory = next((run.memory for run in summary.runs if run.memory), None)
    notes = [
        f"losses: nats per byte; byte frequencies alone give {summary.unigram_loss:.4f}",
        f"train loss, grad norm: mean of the last {LAST_STEPS} steps; ms/step: median",
        "saved: activations kept for backward",
    ]
    band = noise(summary.runs)
    if band is not None:
        notes.append(f"bf16-2: the same with another seed; the two held-out losses are {band:.2%} apart")
    if memory:
        notes.append(f"peak: of one step; {memory.method}")
    return notes


def _relative(run: RunResult, baseline: RunResult) -> str:
    return _UNKNOWN if run is baseline else _number(difference(run, baseline), "+.2%")


def _number(value: float, form: str) -> str:
    return _UNKNOWN if math.isnan(value) else format(value, form)


def _mebibytes(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count / _MIB:.1f}"
