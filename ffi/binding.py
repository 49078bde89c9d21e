"""The compiled binding, or the reason why there is none."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from te_hal.schema.errors import BackendUnavailableError

_BUILD_AGAIN = "install a C compiler and cffi, then run `python te_hal/ffi/build_native.py` or install te_hal again"


class Binding(NamedTuple):
    """cffi's two objects: the functions and constants, and the tool for strings and buffers."""

    lib: Any
    ffi: Any


@functools.cache
def binding() -> Binding:
    """The binding of this process.

    Raises:
        BackendUnavailableError: te_hal was installed without a C compiler, or the extension cannot be imported here.
    """
    try:
        from te_hal.ffi import _native  # noqa: PLC0415 - an install without a compiler does not have it
    except ImportError as error:
        raise BackendUnavailableError(
            "te_hal.ffi._native, the binding of the native backends",
            got=_reason(error),
            accepted="the extension that an install with a C compiler builds",
            todo=_BUILD_AGAIN,
        ) from error
    return Binding(_native.lib, _native.ffi)


def _reason(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"module {error.name} missing"
    # Without the file, `from package import name` raises the plain kind.
    if "cannot import name '_native'" in str(error):
        return "none, as te_hal was installed without a C compiler"
    return f"one that cannot be imported: {error}"
