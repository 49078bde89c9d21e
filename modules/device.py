"""Where parameters are made when a module is not told."""

from __future__ import annotations

import torch

from te_hal.dispatch import ANY_DEVICE, default_device, forced_backend
from te_hal.schema.errors import ArgumentError


def parameter_device(device: torch.device | str | int | None, where: str = "device") -> torch.device:
    """The device for parameters: the given one, else the current backend's.

    A forced backend that serves torch's default device, no forced one, or a default of meta, where parameters wait for
    a device: that device. Otherwise the first device type that the forced backend serves.

    Raises:
        ArgumentError: no device of torch; ``where`` says whose argument it is.
    """
    if device is not None:
        return _named(where, device)
    default = default_device()
    backend = forced_backend()
    if backend is None or not backend.serves.isdisjoint({ANY_DEVICE, default.type}) or default.type == "meta":
        return default
    return torch.device(min(backend.serves))


def _named(where: str, device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            where,
            got=repr(device),
            accepted="a torch.device, its text, or None for the current backend's",
            todo="correct it, or import the package that adds this device to torch",
        ) from error
