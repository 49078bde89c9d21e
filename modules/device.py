"""Where parameters are made when a module is not told."""

from __future__ import annotations

from typing import Any

import torch

from te_hal.dispatch import ANY_DEVICE, default_device, forced_backend
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags


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


def first_reset(module: Any) -> None:  # noqa: ANN401 - a module with reset_parameters
    """Fill the parameters of a module that is being made; those on ``meta`` wait."""
    waits = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    module.reset_parameters(**({"defer_init": True} if waits else {}))


def make_real(module: torch.nn.Module, *, wait: bool) -> None:
    """Give parameters and buffers on ``meta`` memory on the current backend's device, as they are about to be filled.

    Under ``torch.device("meta")`` that device is ``meta`` as well, and nothing happens.

    Args:
        module: whose own.
        wait: leave them on ``meta``.

    Raises:
        ArgumentError: ``wait`` is no bool.
    """
    check_flags("reset_parameters", {"defer_init": wait})
    device = parameter_device(None)
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if not wait and device.type != "meta" and any(tensor.is_meta for tensor in own):
        module.to_empty(device=device, recurse=False)


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
