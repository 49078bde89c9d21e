"""What a native backend stands on in te_hal itself: the binding, a compiler for its target, its kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.doctor.check import Check, State
from te_hal.ffi.binding import binding
from te_hal.ffi.locations import candidates, find_library, library_name
from te_hal.ffi.sources import source_hash
from te_hal.ffi.toolchains import TOOLCHAINS, BuildError, compiler_name
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.errors import TeHalError


def native_checks(target: str) -> list[Check]:
    """Binding, compiler and library of a target.

    Args:
        target: "musa", "cuda" or "host".
    """
    bound = _binding()
    return [bound, _compiler(target), _library(target, usable_binding=bound.state is State.OK)]


def foreign_checks(native: Native) -> list[Check]:
    """Binding and library of a backend whose library te_hal does not build."""
    bound, layer = _binding(), f"kernel library of {native.backend}"
    if bound.state is not State.OK:
        return [bound]
    try:
        library = native.library
    except BackendUnavailableError as error:
        state = State.ABSENT if error.got == "no such file" else State.WRONG
        return [bound, Check(layer, state, f"{error.where.removeprefix('kernel library ')}: {error.got}", error.todo)]
    return [bound, Check(layer, State.OK, f"{library.path}: {', '.join(library.architectures)}")]


def _binding() -> Check:
    try:
        lib = binding().lib
    except BackendUnavailableError as error:
        return _from(error, "binding te_hal.ffi._native", State.ABSENT)
    return Check("binding te_hal.ffi._native", State.OK, f"ABI version {int(lib.TE_HAL_ABI_VERSION)}")


def _compiler(target: str) -> Check:
    layer = f"compiler for {target}"
    try:
        path = TOOLCHAINS[target].find()
    except BuildError as error:
        return _from(error, layer, State.ABSENT)
    try:
        return Check(layer, State.OK, f"{compiler_name(path)} ({path})")
    except (OSError, BuildError) as error:
        return Check(layer, State.WRONG, f"{path}, which does not run: {error}", "install it again")


def _library(target: str, *, usable_binding: bool) -> Check:
    there = [path for path in candidates(target) if path.exists()]
    if not usable_binding:
        found = f"{there[0]}, not opened without the binding" if there else "none"
        return Check(library_name(target), State.ABSENT, found, "make the binding work first")
    try:
        library = find_library(target)
    except BackendUnavailableError as error:
        return _from(error, library_name(target), State.WRONG if there else State.ABSENT)
    sources = "these sources" if library.source_hash == source_hash() else f"other sources ({library.source_hash})"
    code = ", ".join(library.architectures) or "no device"
    return Check(library_name(target), State.OK, f"{library.path}: {code}, built by {library.compiler} from {sources}")


def _from(error: TeHalError, layer: str, state: State) -> Check:
    return Check(layer, state, error.got, error.todo)
