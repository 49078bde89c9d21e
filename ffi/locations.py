"""Where the kernel library of a target is looked for, and the search itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from te_hal.ffi.loader import open_library
from te_hal.ffi.sources import FOLDER, cache_folder, source_hash
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from te_hal.ffi.library import Library

#: Where an installation keeps the libraries that it came with.
SHIPPED = FOLDER / "lib"


def library_name(target: str) -> str:
    """The file's name: libte_hal_musa.so."""
    return f"libte_hal_{target}.so"


def candidates(target: str) -> list[Path]:
    """Every place for a target's library, in the order in which they are tried; none needs to exist.

    First the folders of TE_HAL_LIBRARY_PATH; then what was built on this machine from the sources as they are, the
    newest first; then what the installation came with.
    """
    name = library_name(target)
    named = [Path(folder).expanduser() / name for folder in ENVIRONMENT.library_path]
    built = [path for path in cache_folder().glob(f"{target}*-{source_hash()}/{name}") if _is_plain(path, target)]
    built.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [*named, *built, SHIPPED / name]


def _is_plain(path: Path, target: str) -> bool:
    """Whether a folder of the cache is of this target, and no build with a sanitizer, which Python cannot open."""
    parts = path.parent.name.split("-")
    return parts[0] == target and not {"address", "undefined"} & set(parts)


def find_library(target: str) -> Library:
    """Open the library of a target: of the places that hold one, the first.

    A library that is there and refused ends the search: another one in its stead would hide what is wrong.

    Args:
        target: "musa", "cuda" or "host".

    Raises:
        BackendUnavailableError: none is there, saying where it was looked for; or the first is refused, and why.
    """
    places = candidates(target)
    for path in places:
        if path.exists():
            library = open_library(path)
            if library.backend != target:
                raise _refusal(path, target, got=f"a library for {library.backend}", accepted=f"one for {target}")
            if path.parent == SHIPPED and library.source_hash != source_hash():
                got = f"a library built from other sources ({library.source_hash})"
                raise _refusal(path, target, got=got, accepted=f"one built from these ({source_hash()})")
            return library
    raise BackendUnavailableError(
        f"kernel library {library_name(target)}",
        got=f"no such file in {', '.join(str(path.parent) for path in places)}, nor a build of these sources in "
        f"{cache_folder()}",
        accepted="one built from the sources that came with te_hal, or one in a folder of TE_HAL_LIBRARY_PATH",
        todo=f"run te-hal build-kernels --target {target}",
    )


def _refusal(path: Path, target: str, *, got: str, accepted: str) -> BackendUnavailableError:
    todo = f"put the right one in its place, or run te-hal build-kernels --target {target}"
    return BackendUnavailableError(f"kernel library {path}", got=got, accepted=accepted, todo=todo)
