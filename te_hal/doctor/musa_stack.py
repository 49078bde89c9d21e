"""What stands below torch_musa: device files, driver, SDK, and whether torch_musa and torch belong together."""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import torch

from te_hal.doctor.check import Check, State
from te_hal.doctor.installation import version_of

_DEVICES = Path("/dev")
_MODULES = Path("/proc/modules")
_USUAL_SDK = Path("/usr/local/musa")


def musa_checks() -> list[Check]:
    """From the bottom up."""
    return [_device_files(), _driver(), _sdk(), _torch_musa()]


def _device_files() -> Check:
    files = sorted(_DEVICES.glob("mtgpu*"))
    if not files:
        todo = (
            "load the driver module; in a container, install mt-container-toolkit and set MTHREADS_VISIBLE_DEVICES=all"
        )
        return Check("device files", State.ABSENT, f"no mtgpu* in {_DEVICES}", todo)
    closed = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return Check("device files", State.WRONG, f"no access to {', '.join(closed)}", "join the group render")
    return Check("device files", State.OK, ", ".join(map(str, files)))


def _driver() -> Check:
    try:
        loaded = any(line.startswith("mtgpu") for line in _MODULES.read_text(encoding="utf-8").splitlines())
    except OSError:
        loaded = False
    tool = shutil.which("mthreads-gmi")
    if not loaded:
        todo = "install the driver, then sudo modprobe mtgpu; it builds for kernels 5.4 to 5.15"
        return Check("driver", State.ABSENT, "module mtgpu is not loaded", todo)
    if tool is None:
        return Check(
            "driver", State.NOTE, "module mtgpu is loaded, mthreads-gmi is not on PATH", "copy it into the container"
        )
    return Check("driver", State.OK, f"module mtgpu is loaded; {tool}")


def _sdk() -> Check:
    named = next(
        (os.environ[name] for name in ("MUSA_HOME", "MUSA_PATH", "MUSA_INSTALL_PATH") if os.environ.get(name)), ""
    )
    home = Path(named) if named else _USUAL_SDK
    if not home.is_dir():
        state = State.WRONG if named else State.ABSENT
        return Check("MUSA SDK", state, f"no folder {home}", "install it, or set MUSA_HOME to where it is")
    lib = home / "lib"
    if not (lib / "libmusart.so").exists():
        return Check("MUSA SDK", State.WRONG, f"{home} without lib/libmusart.so", "install the whole SDK")
    if str(lib) not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        return Check("MUSA SDK", State.NOTE, f"{home}", f"add {lib} to LD_LIBRARY_PATH if a library cannot be opened")
    return Check("MUSA SDK", State.OK, f"{home}")


def _torch_musa() -> Check:
    version = version_of("torch_musa")
    if not version:
        return Check("torch_musa", State.ABSENT, "not installed", "install the wheel that fits torch and the SDK")
    wanted = wanted_torch()
    own = str(torch.__version__).split("+")[0]
    if wanted and not own.startswith(wanted):
        todo = f"install torch {wanted}, or a torch_musa for torch {own}"
        return Check("torch_musa", State.WRONG, f"{version}, built for torch {wanted}; this is torch {own}", todo)
    return Check("torch_musa", State.OK, f"{version}{f', for torch {wanted}' if wanted else ''}")


def wanted_torch() -> str:
    """The torch version that the installed torch_musa requires, as its metadata says; empty where it says none."""
    for requirement in metadata.requires("torch_musa") or ():
        exact = re.match(r"torch\s*\(?==\s*([\d.]+)", requirement)
        if exact:
            return exact[1].rstrip(".")
    return ""
