"""Opens a kernel library, once per file, and says of one that it refuses which case it is.

The cases: the file is missing, not readable, no library or a part of one, of the wrong architecture; a library that it
needs is missing; a symbol is missing; it speaks an ABI that is too old or too new; its table is truncated or lies.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

from te_hal.ffi import elf, table
from te_hal.ffi.binding import binding
from te_hal.ffi.library import Library
from te_hal.schema.errors import BackendUnavailableError

_BUILD = "build the library again: te-hal build-kernels"
_SYMBOL = b"te_hal_get_api"
_ANY_VERSION = 0xFFFFFFFF
_TEXT_BYTES = 4096


class _Open:
    """The libraries of this process, by their resolved file, and the lock under which they are opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[Path, Library] = {}

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock in the parent does not exist here."""
        self.lock = threading.Lock()


_OPEN = _Open()
os.register_at_fork(after_in_child=_OPEN.renew_lock)


class _Refusal(NamedTuple):
    got: str
    accepted: str
    todo: str = ""


def open_library(path: Path, *, build: str = _BUILD) -> Library:
    """The library in a file. Opened and judged the first time; threads that ask meanwhile wait and get the same one.

    A refusal is not remembered: the file may be replaced.

    Args:
        path: the file.
        build: what a refusal advises, where the library itself is what is wrong.

    Raises:
        BackendUnavailableError: it cannot be used; names the file, the case, and the loader's own words.
    """
    resolved = path.resolve()
    with _OPEN.lock:
        known = _OPEN.libraries.get(resolved)
        if known is None:
            known = _OPEN.libraries[resolved] = _open(path, build)
        return known


def _open(path: Path, build: str) -> Library:
    refusal = _refused_file(path)
    if refusal is None:
        handle, text = _dlopen(path)
        found = _api_of(handle) if handle else _refused_by_loader(text)
        if not isinstance(found, _Refusal):
            return Library(path, found)
        refusal = found
        if handle:
            binding().lib.te_hal_close_library(handle)
    raise BackendUnavailableError(
        f"kernel library {path}", got=refusal.got, accepted=refusal.accepted, todo=refusal.todo or build
    )


def _refused_file(path: Path) -> _Refusal | None:
    """What can be told without loading anything."""
    accepted = "a shared library for this machine"
    if not path.is_file():
        return _Refusal("no such file" if not path.exists() else "no file", accepted)
    try:
        got = elf.refusal(path, Path("/proc/self/exe"))
    except OSError as error:
        return _Refusal(f"a file that cannot be read ({error.strerror})", accepted, "correct its permissions")
    return _Refusal(got, accepted) if got else None


def _dlopen(path: Path) -> tuple[Any, str]:
    native = binding()
    text = native.ffi.new("char[]", _TEXT_BYTES)
    # A path without a slash would be looked for where the system keeps its libraries.
    handle = native.lib.te_hal_open_library(os.fsencode(path.absolute()), text, _TEXT_BYTES)
    return handle, native.ffi.string(text).decode(errors="replace")


def _refused_by_loader(text: str) -> _Refusal:
    missing = re.match(r"(?P<name>[^:]+): cannot open shared object file", text)
    if missing:
        return _Refusal(
            f"a dependency of it missing, {missing['name']} (loader: {text})",
            "the libraries that it needs on the loader's path",
            "install the SDK it was built with, or add that library's folder to LD_LIBRARY_PATH before Python starts",
        )
    symbol = re.search(r"undefined symbol: (\S+?)(?:,|$|\s)", text)
    if symbol:
        return _Refusal(f"a missing symbol, {symbol[1]} (loader: {text})", "libraries that fit together")
    return _Refusal(f"the loader's refusal: {text}", "a library that the loader accepts")


def _api_of(handle: Any) -> Any:  # noqa: ANN401 - cffi's pointers; the table, or a _Refusal
    lib, ffi = binding().lib, binding().ffi
    get_api = lib.te_hal_find_symbol(handle, _SYMBOL)
    if not get_api:
        return _Refusal(f"a missing symbol, {_SYMBOL.decode()}", "a kernel library, which exports that symbol")
    known = int(lib.TE_HAL_ABI_VERSION)
    api = lib.te_hal_ask_for_table(get_api, known)
    if api == ffi.NULL:
        spoken = table.say_version(lib.te_hal_ask_for_table(get_api, _ANY_VERSION))
        return _Refusal(
            f"{spoken}, which is too new: this te_hal knows up to {known}",
            f"ABI versions {table.OLDEST_ABI} to {known}, and newer ones that still serve them",
            "update te_hal, or build the library from its sources",
        )
    got = table.problem(api)
    return _Refusal(got, f"a table as te_hal.h describes it, ABI version {table.OLDEST_ABI} or newer") if got else api
