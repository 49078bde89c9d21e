"""`te-hal backends`: which backends exist, and which of them work here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from te_hal.cli.failure import wrong_input_ends
from te_hal.dispatch import ANY_DEVICE, list_backends

if TYPE_CHECKING:
    from te_hal.dispatch import BackendInfo


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """List the backends: usable here or why not, and for which devices."""
    with wrong_input_ends():
        found = list_backends()
    if as_json:
        print(json.dumps([asdict(backend) for backend in found], indent=1))
        return
    if not found:
        print('no backend is installed; in a checkout, run "python setup.py -q egg_info" once')
        return
    console = Console()
    console.print(_table(found))
    console.print("* takes tensors on the default device", style="dim", highlight=False)


def _table(found: list[BackendInfo]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("backend", "usable", "serves", "default for", "what it is, or why not"):
        table.add_column(heading, overflow="fold")
    in_force = [backend for backend in found if backend.forced] or [backend for backend in found if backend.default]
    for backend in found:
        table.add_row(
            f"{backend.name} *" if backend in in_force else backend.name,
            "[green]yes[/]" if backend.usable else "[red]no[/]",
            "any" if ANY_DEVICE in backend.serves else ", ".join(backend.serves),
            ", ".join(backend.default_for),
            backend.description if backend.usable else backend.reason,
        )
    return table
