"""Python, torch, te_hal and the variables of the environment."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from te_hal._version import __version__
from te_hal.cli import LIBRARIES
from te_hal.dispatch.discovery import GROUP, NO_ENTRY_POINTS, installed
from te_hal.doctor.check import Check, State
from te_hal.schema.environment import ENVIRONMENT, PREFIX, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OLDEST_TORCH = (2, 7)
#: Variables that are not te_hal's, and decide what a vendor's stack finds.
_OTHERS = (
    *("CXX", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
    *("MUSA_HOME", "MUSA_PATH", "MUSA_VISIBLE_DEVICES", "MTHREADS_VISIBLE_DEVICES"),
)


def installation_checks() -> list[Check]:
    """What every backend stands on."""
    return [_python(), _torch(), _te_hal(), _entry_points(), *_extras(), *variable_checks(os.environ)]


def _python() -> Check:
    where = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    if not sys.platform.startswith("linux"):
        return Check("Python", State.NOTE, where, "te_hal is tested on Linux only")
    return Check("Python", State.OK, f"{where} {platform.machine()}")


def _torch() -> Check:
    version = str(torch.__version__)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"{version}, {built}, {torch.get_num_threads()} threads"
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit())
    if numbers < _OLDEST_TORCH:
        return Check("torch", State.WRONG, found, "install torch 2.7 or newer")
    return Check("torch", State.OK, found)


def _te_hal() -> Check:
    where = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - the folder as text
    return Check("te_hal", State.OK, f"{__version__} in {where}")


def _entry_points() -> Check:
    names = sorted(installed())
    if not names:
        return Check(f"entry points {GROUP}", State.WRONG, "none", NO_ENTRY_POINTS)
    return Check(f"entry points {GROUP}", State.OK, ", ".join(names))


def _extras() -> Iterator[Check]:
    for name in ("cffi", *LIBRARIES):
        version = version_of(name)
        need = "the native backends need it" if name == "cffi" else "te-hal compare needs it"
        if version:
            yield Check(name, State.OK, version)
        else:
            yield Check(name, State.ABSENT, "not installed", f"pip install {name}; {need}")


def version_of(distribution: str) -> str:
    """The installed version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def variable_checks(variables: Mapping[str, str]) -> list[Check]:
    """Variables that are set and matter here, and TE_HAL_* names that nobody reads.

    Args:
        variables: the environment as it is now; te_hal goes by the one at import.
    """
    known = {variable.name for variable in TABLE}
    own = [name for name in sorted(variables) if name.startswith(PREFIX)]
    checks = []
    for name in own:
        if name in known:
            checks.append(Check(name, State.NOTE, repr(variables[name])))
        else:
            todo = f"nobody reads it; known: {', '.join(sorted(known))}"
            checks.append(Check(name, State.WRONG, repr(variables[name]), todo))
    gone = [name for name in ENVIRONMENT.unknown if name not in variables]
    checks += [Check(name, State.WRONG, "was set at import", "nobody reads it") for name in gone]
    return checks + [Check(name, State.NOTE, repr(variables[name])) for name in _OTHERS if name in variables]
