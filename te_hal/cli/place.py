"""Where a comparison runs: its backend, its device, and what else its numbers depend on."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import te_hal
from te_hal.cli.backends import one_line_each
from te_hal.dispatch import backend_for
from te_hal.modules.device import parameter_device
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError


@dataclass(frozen=True)
class Place:
    """A backend and the device that its tensors are on.

    Attributes:
        backend: the backend's name.
        forced: whether it was asked for by name.
        device: where parameters and batches live.
    """

    backend: str
    forced: bool
    device: torch.device

    def in_force(self) -> AbstractContextManager[None]:
        """The context that training runs in."""
        return te_hal.use_backend(self.backend) if self.forced else nullcontext()

    def machine(self) -> dict[str, Any]:
        """What numbers may depend on beside the configuration, by name; plain values."""
        return {
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "te_hal": te_hal.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
        }


def find_place(name: str | None) -> Place:
    """The backend of that name, or the one in force, and a device for it.

    Raises:
        BackendNotFoundError: unknown; says what exists and why each is unusable.
        BackendUnavailableError: known, but not usable on this machine, or it computes nothing.
    """
    if name == "null":
        raise BackendUnavailableError(
            "te-hal compare: --backend",
            got="'null', which checks arguments and computes nothing",
            accepted="a backend that trains",
            todo="choose another one from `te-hal backends`",
        )
    try:
        if name is None:
            device = parameter_device(None)
            return Place(backend_for(device).name, forced=False, device=device)
        with te_hal.use_backend(name):
            return Place(name, forced=True, device=parameter_device(None))
    except (BackendNotFoundError, BackendUnavailableError) as error:
        others = [backend for backend in te_hal.list_backends() if backend.name != "null"]
        raise type(error)(
            error.where if name is None else "te-hal compare: --backend",
            got=error.got,
            accepted="one that is usable",
            todo=f"choose one with --backend; `te-hal backends` says more\n{one_line_each(others)}",
        ) from None


def device_name(device: torch.device) -> str:
    """The device as its maker calls it, with torch's name for it."""
    if device.type != "cpu":
        return f"{torch.get_device_module(device).get_device_name(device)} ({device})"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()} (cpu)"
