"""Build a kernel library: ``python -m te_hal.ffi.build --target host|cuda|musa [--arch ARCH ...]``.

The library lands in the user's cache, in a folder named after the target, its architectures and the hash of the
sources, so that an edited source is a new library and an old one is never mistaken for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from te_hal._version import __version__
from te_hal.ffi.commands import Ended, run_together
from te_hal.ffi.sources import cache_folder, source_hash
from te_hal.ffi.toolchains import TOOLCHAINS, Build, BuildError, Toolchain, compiler_name

if TYPE_CHECKING:
    from collections.abc import Sequence

SANITIZERS = ("address", "undefined")
_LINES_SHOWN = 15


def library_path(
    target: str, architectures: Sequence[str] = (), *, sanitizer: str = "", cache: Path | None = None
) -> Path:
    """Where :func:`build` puts this library for the sources as they are; it need not exist.

    Args:
        target: "host", "cuda" or "musa".
        architectures: what it holds code for; empty: the target's default.
        sanitizer: "", "address" (with undefined behaviour) or "undefined"; host only.
        cache: folder to look in; None: the user's cache.

    Raises:
        BuildError: unknown target, architecture or sanitizer.
    """
    toolchain, architectures = _checked(target, architectures, sanitizer)
    parts = (target, *(a for a in architectures if a != target), *([sanitizer] if sanitizer else []), source_hash())
    return (cache or cache_folder()) / "-".join(parts) / f"libte_hal_{toolchain.target}.so"


def build(
    target: str,
    architectures: Sequence[str] = (),
    *,
    sanitizer: str = "",
    cache: Path | None = None,
    force: bool = False,
) -> Path:
    """The library for these arguments (see :func:`library_path`), compiled unless it is there already.

    Args:
        target: "host", "cuda" or "musa".
        architectures: what to hold code for; empty: the target's default.
        sanitizer: build with a sanitizer.
        cache: folder to build in; None: the user's cache.
        force: compile even if the library is there.

    Raises:
        BuildError: no compiler, or it failed; the text has its last lines and names the log.
    """
    toolchain, architectures = _checked(target, architectures, sanitizer)
    path = library_path(target, architectures, sanitizer=sanitizer, cache=cache)
    if path.is_file() and not force:
        return path
    compiler = toolchain.find()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix="building-"))
    plan = Build(
        compiler=compiler,
        architectures=architectures,
        sanitizer=sanitizer,
        defines={
            "TE_ARCHITECTURES": ",".join(architectures),
            "TE_VERSION": __version__,
            "TE_SOURCE_HASH": source_hash(),
            "TE_COMPILER": " ".join(filter(None, (compiler_name(compiler), sanitizer and f"{sanitizer}-sanitizer"))),
        },
        folder=scratch,
    )
    try:
        _run_all(toolchain, plan, path.with_name("build.log"))
        # In one step, so that a build that runs at the same time, or dies, leaves no half a library.
        os.replace(plan.library, path)  # noqa: PTH105 - the name says that it replaces
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _checked(target: str, architectures: Sequence[str], sanitizer: str) -> tuple[Toolchain, tuple[str, ...]]:
    where = f"build-kernels ({target})"
    toolchain = TOOLCHAINS.get(target)
    if toolchain is None:
        raise BuildError(where, got=f"target {target!r}", accepted=", ".join(TOOLCHAINS), todo="choose one of them")
    chosen = tuple(architectures) or toolchain.default_architectures
    wrong = [name for name in chosen if not toolchain.architecture.fullmatch(name)]
    if wrong:
        accepted = f"names like {', '.join(toolchain.default_architectures)}"
        raise BuildError(where, got=f"architecture {wrong[0]!r}", accepted=accepted, todo="correct --arch")
    if sanitizer and (sanitizer not in SANITIZERS or target != "host"):
        accepted = f"{' or '.join(SANITIZERS)}, for the host"
        raise BuildError(where, got=f"sanitizer {sanitizer!r}", accepted=accepted, todo="leave --sanitizer out")
    return toolchain, chosen


def _run_all(toolchain: Toolchain, plan: Build, log: Path) -> None:
    with log.open("w", encoding="utf-8") as record:
        for commands in (toolchain.compile(plan), [toolchain.link(plan)]):
            with closing(run_together(commands)) as results:
                for ended in results:
                    record.write(f"$ {' '.join(ended.command)}\n{ended.output}\n")
                    record.flush()
                    if ended.status != 0:
                        _fail(toolchain.target, ended, log)


def _fail(target: str, ended: Ended, log: Path) -> None:
    last = "\n  ".join(ended.output.splitlines()[-_LINES_SHOWN:]) or "(it printed nothing)"
    raise BuildError(
        f"build-kernels ({target})",
        got=f"status {ended.status} from {ended.command[0]}, whose last lines are\n  {last}\n",
        accepted="status 0",
        todo=f"see {log} for the command and all it printed",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line says and print the library's path; 1 and the reason on standard error if not."""
    parser = argparse.ArgumentParser(prog="python -m te_hal.ffi.build", description="Build a kernel library.")
    parser.add_argument("--target", choices=tuple(TOOLCHAINS), default="host", help="what to build for")
    parser.add_argument("--arch", action="append", default=[], help="architecture (sm_90, mp_31); may be repeated")
    parser.add_argument("--sanitizer", choices=SANITIZERS, default="", help="host only")
    parser.add_argument("--cache", type=Path, default=None, help="folder to build in; default: the user's cache")
    parser.add_argument("--force", action="store_true", help="compile even if the library is there")
    options = parser.parse_args(arguments)
    try:
        path = build(
            options.target, options.arch, sanitizer=options.sanitizer, cache=options.cache, force=options.force
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
