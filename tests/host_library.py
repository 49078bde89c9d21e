"""The host library as the tests use it: compiled at most once in a session, also where compiling fails."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from te_hal.ffi.build import build, library_path
from te_hal.ffi.toolchains import TOOLCHAINS, BuildError


@functools.cache
def _outcome(path: Path, sanitizer: str) -> Path | BuildError:
    """What building for `path`, whose name holds the sources' hash, came to."""
    try:
        return build("host", sanitizer=sanitizer, cache=path.parent.parent)
    except BuildError as error:
        return error


def host_library_path(sanitizer: str | None = None) -> Path:
    """The library of the sources as they are, in the user's cache; skips the test where it cannot be built.

    The first test that asks waits for the compiler. If that fails, later ones skip at once with the same reason.

    Args:
        sanitizer: "", "address" or "undefined"; None: the one that KERNEL_TEST_SANITIZER names, if any.
    """
    chosen = os.environ.get("KERNEL_TEST_SANITIZER", "") if sanitizer is None else sanitizer
    outcome = _outcome(library_path("host", sanitizer=chosen), chosen)
    if isinstance(outcome, BuildError):
        pytest.skip(str(outcome))
    return outcome


def sanitizer_environment() -> dict[str, str]:
    """Variables with which Python can open a library built for the address sanitizer; skips where there is none.

    Leaks are not looked for: the interpreter's own would be all that is found.
    """
    compiler = TOOLCHAINS["host"].find()
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip("the compiler has no sanitizers' libraries")
    return {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
