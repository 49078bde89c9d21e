"""The choice of one backend: the policy's for the op, else the forced one, else the first that the policy prefers.

If nothing of that is said: the one that claims the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.dispatch import listing, registry, selection
from te_hal.dispatch.policy import EVERY_OP
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
    return choose(selection.current(), device, op).backend


class Choice(NamedTuple):
    """The backend that is asked first, and who has chosen it, in words."""

    backend: Backend
    by: str


def choose(chosen: Selection, device: torch.device, op: str | None) -> Choice:
    """As :func:`backend_for`, under a given selection."""
    policy, by = chosen.policy, chosen.policy_by
    sent_to = None if op is None else policy.per_op.get(op)
    if sent_to is not None:
        return Choice(_serving(listing.find_usable(sent_to, by), device, by), f"per_op of {by}")
    order = policy.order_of(op)
    if order is not None:
        return Choice(_first_that_works(chosen, order, device, str(op)), f"order of {by}")
    if chosen.forced is not None:
        return Choice(
            _serving(listing.find_usable(chosen.forced, chosen.forced_by), device, chosen.forced_by), chosen.forced_by
        )
    for name in policy.order.get(EVERY_OP, ()):
        if not _out_of_question(chosen, name, device, op):
            return Choice(registry.tables().backends[name], f"order of {by}")
    return Choice(_claimant(chosen, device), f"its claim on {device.type}")


def _claimant(chosen: Selection, device: torch.device) -> Backend:
    """The one usable backend that claims the device and is not kept from every op."""
    found = claims(device.type)
    barred = [backend for backend in found if chosen.policy.bars(None, backend.name)]
    claimants = [backend for backend in found if backend not in barred]
    if len(claimants) == 1:
        return claimants[0]
    names = ", ".join(backend.name for backend in claimants)
    but = ", ".join(
        f"{b.name}, kept from it by {chosen.policy.bars(None, b.name)} of {chosen.policy_by}" for b in barred
    )
    got = f"{len(claimants)} backends that claim it unasked ({names})" if claimants else "none that claims it"
    raise BackendUnavailableError(
        f"backend for {device}",
        got=f"{got} (but {but})" if but else got,
        accepted=listing.say_all(),
        todo="choose one with te_hal.set_backend(name)",
    )


def _first_that_works(chosen: Selection, order: tuple[str, ...], device: torch.device, op: str) -> Backend:
    reasons = {name: _out_of_question(chosen, name, device, op) for name in order}
    found = next((name for name, reason in reasons.items() if not reason), None)
    if found is not None:
        return registry.tables().backends[found]
    raise BackendUnavailableError(
        f"{chosen.policy_by}: order of {op}",
        got="; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no backend at all",
        accepted=f"one that works with tensors on {device}",
        todo="add another backend to the order, or take the op out of it",
    )


def _out_of_question(chosen: Selection, name: str, device: torch.device, op: str | None) -> str:
    """Why a backend of an order is passed over, whatever the call; empty: it is not."""
    known = registry.tables()
    if name not in known.backends:
        return known.failures.get(name, "is not known")
    backend = known.backends[name]
    answer = registry.ask_usable(backend)
    if not answer:
        return answer.sentence
    if not backend.takes(device.type):
        return f"does not serve {device.type}"
    barred = chosen.policy.bars(op, name)
    return f"kept from it by {barred} of {chosen.policy_by}" if barred else ""


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
