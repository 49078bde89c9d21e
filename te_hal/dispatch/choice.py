"""The choice of one backend: the policy's for the op, else the forced one, else the one that claims the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import listing, registry, selection
from te_hal.schema.errors import BackendUnavailableError

if TYPE_CHECKING:
    from te_hal.dispatch.selection import Selection
    from te_hal.schema.backend import Backend


def default_device() -> torch.device:
    """The device on which torch makes a tensor that names none.

    ``torch.get_default_device`` of torch 2.7 answers the same only while no ``with torch.device(...)`` block is open,
    and raises after ``torch.set_default_device(None)``.
    """
    return torch.empty(0).device


def get_backend() -> Backend:
    """The forced backend; where none is, the one in force for :func:`default_device`.

    Raises:
        BackendNotFoundError, BackendUnavailableError: none, or more than one; says what exists.
    """
    return forced_backend() or backend_for(default_device())


def forced_backend() -> Backend | None:
    """The backend that set_backend, use_backend or TE_HAL_BACKEND forces; None where the device decides.

    Raises:
        BackendNotFoundError, BackendUnavailableError: TE_HAL_BACKEND names one that cannot be used.
    """
    chosen = selection.current()
    if chosen.forced is None:
        return None
    return listing.find_usable(chosen.forced, chosen.forced_by)


def backend_for(device: torch.device, op: str | None = None) -> Backend:
    """The backend in force for tensors on a device, before any fallback.

    Args:
        device: where the tensors are.
        op: if given, a policy's ``per_op`` entry comes first.

    Raises:
        BackendNotFoundError: TE_HAL_BACKEND names one that does not exist.
        BackendUnavailableError: the forced one does not serve the device, nobody claims it, or several do.
    """
    return choose(selection.current(), device, op)


def choose(chosen: Selection, device: torch.device, op: str | None) -> Backend:
    """As :func:`backend_for`, under a given selection."""
    sent_to = None if op is None else chosen.policy.per_op.get(op)
    if sent_to is not None:
        return _serving(listing.find_usable(sent_to, chosen.policy_by), device, chosen.policy_by)
    if chosen.forced is not None:
        return _serving(listing.find_usable(chosen.forced, chosen.forced_by), device, chosen.forced_by)
    claimants = claims(device.type)
    if len(claimants) == 1:
        return claimants[0]
    names = ", ".join(backend.name for backend in claimants)
    raise BackendUnavailableError(
        f"backend for {device}",
        got=f"{len(claimants)} backends that claim it unasked ({names})" if claimants else "none that claims it",
        accepted=listing.say_all(),
        todo="choose one with te_hal.set_backend(name)",
    )


def claims(device_type: str) -> list[Backend]:
    """The usable backends that claim a device type unasked, by name."""
    known = registry.tables().backends
    asked = [known[name] for name in sorted(known) if device_type in known[name].default_for]
    return [backend for backend in asked if registry.ask_usable(backend)]


def _serving(backend: Backend, device: torch.device, where: str) -> Backend:
    if backend.takes(device.type):
        return backend
    raise BackendUnavailableError(
        where,
        got=f"tensors on {device} for backend {backend.name!r}",
        accepted=f"tensors on {', '.join(sorted(backend.serves))}",
        todo="move the tensors, or choose a backend that serves their device",
    )
