"""Where parameters are made when a module is not told."""

from __future__ import annotations

import torch

from te_hal.dispatch import ANY_DEVICE, default_device, forced_backend


def parameter_device(device: torch.device | str | None) -> torch.device:
    """The device for parameters: the given one, else the current backend's.

    A forced backend that serves torch's default device, or no forced one: that device. Otherwise the first device
    type that the forced backend serves.
    """
    if device is not None:
        return torch.device(device)
    default = default_device()
    backend = forced_backend()
    if backend is None or ANY_DEVICE in backend.serves or default.type in backend.serves:
        return default
    return torch.device(min(backend.serves))
