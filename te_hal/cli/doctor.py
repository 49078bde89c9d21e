"""`te-hal doctor`: what is installed, what works, and what to do about the rest."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from te_hal.cli.failure import FAILED
from te_hal.doctor import diagnose


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, for a bug report.")] = False,
) -> None:
    """Look at the installation, at every backend and at what it stands on. Exit code 0: the selected one is usable."""
    found = diagnose()
    print(json.dumps(found.as_dict(), indent=1) if as_json else found)
    if not found.healthy:
        raise typer.Exit(FAILED)
