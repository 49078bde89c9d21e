"""`te-hal build-kernels`: compile a kernel library from the sources that ship with the package."""

from __future__ import annotations

from enum import Enum
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

from te_hal.cli.failure import FAILED, fail
from te_hal.ffi.build import SANITIZERS, build
from te_hal.ffi.toolchains import TOOLCHAINS, BuildError

Target = Enum("Target", {name: name for name in TOOLCHAINS}, type=str)  # type: ignore[misc] # typer wants an Enum
Sanitizer = Enum("Sanitizer", {name: name for name in SANITIZERS}, type=str)  # type: ignore[misc]


def build_kernels(
    target: Annotated[Target, typer.Option(help="What to build for.")],
    arch: Annotated[list[str] | None, typer.Option(help="Architecture (mp_22, mp_31, sm_90); may be repeated.")] = None,
    sanitizer: Annotated[Sanitizer | None, typer.Option(help="Build the host library with a sanitizer.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder to build in; default: the user's cache.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile even if the library is there.")] = False,
) -> None:
    """Compile a kernel library and print its path. A failing compiler's last lines and its log are shown."""
    try:
        path = build(target.value, arch or [], sanitizer=sanitizer.value if sanitizer else "", cache=cache, force=force)
    except BuildError as error:
        fail(str(error), FAILED)
    else:
        print(path)
