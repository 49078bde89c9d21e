"""`te-hal backends`: which backends exist, and which of them work here."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from te_hal.cli.failure import FAILED, wrong_input_ends
from te_hal.dispatch import ANY_DEVICE, list_backends, probe_backends

if TYPE_CHECKING:
    from te_hal.dispatch import BackendInfo

#: Below this the last column of the table would be left with a word a line.
_NARROW = 72
_LINE = 80


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Load each in a process of its own: names one that crashes or hangs.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Of --probe: seconds that one may take.")] = 60.0,
) -> None:
    """List the backends: usable here or why not, and for which devices."""
    if probe:
        _probe(timeout, as_json=as_json)
        return
    with wrong_input_ends():
        found = list_backends()
    if as_json:
        print(json.dumps([asdict(backend) for backend in found], indent=1))
        return
    if not found:
        print('no backend is installed; in a checkout, run "python setup.py -q egg_info" once')
        return
    console = Console()
    if console.width < _NARROW:
        for backend in found:
            print(_stacked(backend, console.width, starred=backend in in_force(found)))
    else:
        console.print(_table(found))
    console.print("* takes tensors on the default device", style="dim", highlight=False)


def _probe(timeout: float, *, as_json: bool) -> None:
    """A line per backend; exit code 1 where one does not survive its loading."""
    found = probe_backends(timeout)
    if as_json:
        print(json.dumps([asdict(backend) for backend in found], indent=1))
    for backend in () if as_json else found:
        print(f"{backend.name}: {'usable' if backend.usable else backend.reason}")
    if not all(backend.loads for backend in found):
        raise typer.Exit(FAILED)


def _table(found: list[BackendInfo]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("backend", "usable", "serves", "default for", "what it is, or why not"):
        table.add_column(heading, overflow="fold")
    for backend in found:
        table.add_row(
            f"{backend.name} *" if backend in in_force(found) else backend.name,
            "[green]yes[/]" if backend.usable else "[red]no[/]",
            _serves(backend),
            ", ".join(backend.default_for),
            escape(_words(backend)),
        )
    return table


def _stacked(backend: BackendInfo, width: int, *, starred: bool) -> str:
    """One backend as lines below each other, for a terminal that has no room for columns."""
    lines = [
        f"{backend.name}{' *' if starred else ''}: {'usable' if backend.usable else 'not usable'}",
        f"serves {_serves(backend)}" if backend.serves else "",
        f"default for {', '.join(backend.default_for)}" if backend.default_for else "",
        _words(backend),
    ]
    wrapped = (textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  ") for line in lines if line)
    return "\n".join(wrapped).removeprefix("  ")


def in_force(found: list[BackendInfo]) -> list[BackendInfo]:
    """Those that take tensors on the default device: the forced one, else the default ones."""
    return [backend for backend in found if backend.forced] or [backend for backend in found if backend.default]


def _serves(backend: BackendInfo) -> str:
    return "any" if ANY_DEVICE in backend.serves else ", ".join(backend.serves)


def _words(backend: BackendInfo) -> str:
    return backend.description if backend.usable else backend.reason


def one_line_each(found: list[BackendInfo]) -> str:
    """The backends, a line of at most 80 columns each, for error messages; `te-hal backends` has the rest."""
    lines = (f"  {b.name}: {'usable' if b.usable else f'not usable: {b.reason}'}" for b in found)
    return "\n".join(shorten(line, _LINE) for line in lines)


def shorten(line: str, width: int) -> str:
    """The line in one line of at most `width` columns, cut with "..." where it is longer."""
    line = line.replace("\n", " ")
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
