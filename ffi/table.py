"""Judges a library's table before anyone calls through it (the rules at the end of te_hal.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.ffi.binding import binding
from te_hal.ffi.memory_map import allows, mapped_spans

if TYPE_CHECKING:
    from te_hal.ffi.memory_map import Span

#: Everything that this te_hal calls unasked is there since this ABI version.
OLDEST_ABI = 1
_HEADER_BYTES = 8
_POINTER_BYTES = 8
#: No table will ever be this long; a number beyond it is no size.
_LONGEST = 1 << 16
_STRINGS = frozenset({"backend", "architectures", "version", "source_hash", "compiler"})


def entry_names() -> list[tuple[str, bool]]:
    """Name of every pointer that this te_hal knows, in order, and whether it may be NULL."""
    native = binding()
    names: str = native.ffi.string(native.lib.te_hal_entry_names()).decode()
    return [(name.rstrip("?"), name.endswith("?")) for name in names.split(",")]


def say_version(api: Any) -> str:  # noqa: ANN401 - cffi's pointer
    """The version that a table, or NULL, says it is of, for messages."""
    ffi = binding().ffi
    if allows(mapped_spans(), int(ffi.cast("uintptr_t", api)), _HEADER_BYTES, "r"):
        return f"ABI version {ffi.cast('uint32_t *', api)[1]}"
    return "an ABI version that it does not tell"


#: Bytes of the tables of versions that came before; what they lack, a trampoline says when it is called.
_SIZES = {1: 280, 2: 304}


def problem(api: Any) -> str:  # noqa: ANN401 - cffi's pointer
    """What is wrong with a table; empty if it can be used.

    Reads nothing that is not mapped, so a pointer into nowhere and a size that is not true are answers, not crashes.
    """
    ffi, lib = binding().ffi, binding().lib
    address = int(ffi.cast("uintptr_t", api))
    spans = mapped_spans()
    if not allows(spans, address, _HEADER_BYTES, "r"):
        return f"a table at 0x{address:x}, where nothing can be read"
    size, version = (int(word) for word in ffi.cast("uint32_t *", api)[0:2])
    known, own = int(lib.TE_HAL_ABI_VERSION), int(lib.te_hal_api_size())
    if version < OLDEST_ABI:
        return f"ABI version {version}, which is too old: this te_hal needs {OLDEST_ABI} to {known}"
    due = _SIZES.get(version, own)
    if size < due:
        return f"a truncated table: {size} bytes for ABI version {version}, which has {due}"
    if (size > due) != (version > known) or size > _LONGEST:
        told = min(version, known)
        return f"a table that lies about its size: {size} bytes for ABI version {version}; version {told} has {due}"
    if not allows(spans, address, size, "r"):
        return f"a table that lies about its size: {size} bytes, of which the last cannot be read"
    return _wrong_entry(spans, address, min(size, own), ffi)


def _wrong_entry(spans: list[Span], address: int, size: int, ffi: Any) -> str:  # noqa: ANN401 - cffi's
    names = entry_names()[: (size - _HEADER_BYTES) // _POINTER_BYTES]
    pointers = ffi.cast("uintptr_t *", address + _HEADER_BYTES)
    for index, (name, optional) in enumerate(names):
        pointer = int(pointers[index])
        if pointer == 0:
            if optional:
                continue
            return f"a table whose entry {name} is NULL"
        if not allows(spans, pointer, 1, "r" if name in _STRINGS else "x"):
            return f"a table whose entry {name} points to 0x{pointer:x}, where there is no {_kind(name)}"
    return ""


def _kind(name: str) -> str:
    return "text" if name in _STRINGS else "code"
