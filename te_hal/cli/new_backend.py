"""`te-hal new-backend`: write a package that is a backend, with everything left to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from te_hal.cli.failure import wrong_input_ends
from te_hal.porting import Project, write_project


def new_backend(
    name: Annotated[str, typer.Argument(help="What users will write: lower-case letters, digits, underscores.")],
    into: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the new folder goes.")] = Path(),
    device: Annotated[str, typer.Option(metavar="TYPE", help="Device type of its tensors, torch's name.")] = "cpu",
) -> None:
    """Write a package that joins te_hal as a backend: ops as stubs, a C library as a skeleton, and tests."""
    project = Project(name, device)
    with wrong_input_ends():
        folder = write_project(project, into)
    print(f"wrote {folder}; next:")
    print(f"  cd {folder}")
    print("  python -m pip install --no-deps --no-build-isolation -e .")
    print(f"  te-hal conformance --backend {name}")
    print("README.md there says how an op is added, docs/porting.md of te_hal in which order.")
