"""Below the main table: what FP8 cut off by layer and role, saved bytes by part of the model, what the models write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from te_hal.cli.observed import losses_of_format

if TYPE_CHECKING:
    from rich.console import Console

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

_KIB = 2**10
_SAVED = "saved KiB"
#: Blanks between two columns of a table, and of its two edges together.
_BETWEEN = 2
#: What rounds to 0.01%.
_SMALLEST = 5e-5


def print_details(console: Console, summary: Summary) -> None:
    """Print the parts that there is something to say about."""
    for run in summary.runs:
        if run.recipe is not None and losses_of_format(run.observed):
            _print_lost(console, run)
    _print_saved(console, summary.runs)
    _print_samples(console, summary)


def _print_lost(console: Console, run: RunResult) -> None:
    places = losses_of_format(run.observed)
    roles = list(dict.fromkeys(place.role for place in places))
    cells = {(p.module, p.role): f"{_percent(p.clipped)} {_percent(p.flushed)}" for p in places}
    table = _table(f"\n{run.name}: % clipped, flushed", [f"{role}\nclip flush" for role in roles])
    for module in dict.fromkeys(place.module for place in places):
        table.add_row(module, *(cells.get((module, role), "-") for role in roles))
    console.print(table)


def _print_saved(console: Console, runs: list[RunResult]) -> None:
    """A column per run, in as many tables as it takes to have every name and number whole."""
    measured = {run.name: run.memory.saved_by_part for run in runs if run.memory is not None}
    parts = [part for part in next(iter(measured.values()), {}) if any(saved.get(part) for saved in measured.values())]
    columns = {
        name: [f"{saved.get(part, 0) / _KIB:,.0f}" for part in parts] for name, saved in measured.items() if parts
    }
    room = console.width - _BETWEEN - max(map(len, [_SAVED, *parts]))
    for names in _side_by_side(columns, room):
        table = _table(f"\n{_SAVED}", [f"\n{name}" for name in names])
        for row, part in enumerate(parts):
            table.add_row(part, *(columns[name][row] for name in names))
        console.print(table)


def _side_by_side(columns: dict[str, list[str]], room: int) -> list[list[str]]:
    """The columns' names, in groups that are at most `room` wide, or have one column."""
    groups: list[list[str]] = []
    left = 0
    for name, cells in columns.items():
        width = _BETWEEN + max(map(len, [name, *cells]))
        if not groups or left < width:
            groups.append([])
            left = room
        groups[-1].append(name)
        left -= width
    return groups


def _print_samples(console: Console, summary: Summary) -> None:
    written = [run for run in summary.runs if run.sample]
    if not written:
        return
    console.print("what the models write after", repr(summary.prompt), style="dim", highlight=False, markup=False)
    for run in written:
        console.print(f"{run.name}: {run.sample!r}", highlight=False, markup=False)


def _table(first: str, headings: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _percent(share: float) -> str:
    """Five columns; none at all is told from very few."""
    if 0 < share < _SMALLEST:
        return " <.01"
    return f"{100 * share:5.2f}" if share else "    0"
