"""`te-hal replay`: run a call that te_hal.shadow saved, alone."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

from te_hal.cli.failure import FAILED, wrong_input_ends
from te_hal.shadowing import replay


def replay_command(
    file: Annotated[Path, typer.Argument(help="A file that te_hal.shadow wrote.")],
    backend: Annotated[str | None, typer.Option(help="Run it on this one; default: the one it was saved from.")] = None,
) -> None:
    """Run a saved op call again, alone, beside its reference. Exit code 1 where its result leaves the contract."""
    with wrong_input_ends():
        done = replay(file, backend)
    print(done)
    if done.findings:
        raise typer.Exit(FAILED)
