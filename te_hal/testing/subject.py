"""What a run is about: a backend by name, where it comes from, its device and its lists; can go to another process."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import ANY_DEVICE, forced_backend, list_backends, register_backend, use_backend
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.testing.execute import Tested
from te_hal.testing.lists import Lists

if TYPE_CHECKING:
    from te_hal.schema.backend import Backend


@dataclass(frozen=True)
class Subject:
    """A backend to be tested.

    Attributes:
        backend: its name.
        device: where its tensors lie; empty: the CPU if it serves that, else the first device of the type it serves.
        factory: ``module:function`` that makes it, for a backend without an entry point.
        lists: folder with unsupported.toml and xfail.toml; empty: the package of its entry point.
    """

    backend: str
    device: str = ""
    factory: str = ""
    lists: str = ""

    def prepare(self) -> Tested:
        """Load the backend and its lists in this process.

        Raises:
            BackendNotFoundError, BackendUnavailableError: there is none of that name that works here.
            ArgumentError: the factory or the folder of lists cannot be found, a list is wrong, or the device is none
                that torch can use here and the backend serves.
        """
        if self.factory and self.backend not in {known.name for known in list_backends()}:
            register_backend(_made_by(self.factory))
        with use_backend(self.backend):
            backend = forced_backend()
        if backend is None:
            raise StateError(
                "te_hal.testing", got=self.backend, accepted="a usable backend", todo="see `te-hal backends`"
            )
        lists = Lists.in_folder(_folder(self.lists)) if self.lists else Lists.of(self.backend)
        return Tested.of(backend, _usable_device(self.device or _device_of(backend), backend), lists)


def _made_by(factory: str) -> Backend:
    module, _, function = factory.partition(":")
    try:
        made: Backend = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            "factory",
            got=f"{factory!r} ({error})",
            accepted="module:function that returns a Backend",
            todo="correct it",
        ) from error
    return made


def _folder(name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise ArgumentError(
            "lists", got=f"{name!r}, no folder", accepted="a folder that is there", todo="make it, or leave it out"
        )
    return folder


def _usable_device(name: str, backend: Backend) -> torch.device:
    """The device of that name, once torch has made a tensor there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    # torch asserts that it was built for a device type.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        got = f"{name!r}, of which torch says: {str(error).partition(chr(10))[0]}"
        accepted = "a device that this torch can use, such as cpu"
        raise ArgumentError("device", got=got, accepted=accepted, todo="name another one") from error
    if device.type == "meta" or not backend.takes(device.type):
        served = ", ".join(sorted(backend.serves - {ANY_DEVICE})) or "any with data"
        accepted = f"a device that backend {backend.name} serves: {served}"
        raise ArgumentError("device", got=repr(name), accepted=accepted, todo="name another one")
    return device


def _device_of(backend: Backend) -> str:
    if "cpu" in backend.serves or ANY_DEVICE in backend.serves:
        return "cpu"
    return f"{min(backend.serves)}:0"
