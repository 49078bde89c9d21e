"""The selection in force: a forced backend, a policy and their memo; process-wide or in a scope."""

from __future__ import annotations

import contextlib
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import fallback, listing, policy as policies, registry
from te_hal.dispatch.policy import Policy
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentTypeError, BackendUnavailableError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from te_hal.dispatch.backend import Backend

    Memo = dict[tuple[object, ...], Callable[..., Any]]


class Selection:
    """One combination of forced backend and policy, with who set each, and the kernels found under it."""

    __slots__ = ("forced", "forced_by", "memo", "policy", "policy_by")

    def __init__(self, forced: str | None, forced_by: str, policy: Policy, policy_by: str) -> None:
        self.forced = forced
        self.forced_by = forced_by
        self.policy = policy
        self.policy_by = policy_by
        self.memo: Memo = {}


class _InForce:
    """The process-wide selection, and every selection there has been.

    A selection that comes back finds its memo again, so a loop over ``use_backend`` resolves each op once.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[str | None, str, Policy, str], Selection] = {}
        self.process = self.start()

    def start(self) -> Selection:
        """What the environment asks for. Not checked here: a wrong name is an error at first use."""
        policy = Policy(fallback=ENVIRONMENT.fallback)
        return self.selection(ENVIRONMENT.backend, "TE_HAL_BACKEND", policy, "TE_HAL_FALLBACK")

    def selection(self, forced: str | None, forced_by: str, policy: Policy, policy_by: str) -> Selection:
        key = (forced, forced_by, policy, policy_by)
        return self.known.setdefault(key, Selection(*key))

    def renew_memos(self) -> None:
        """A new dict each: a call that is being resolved right now stores into the old one, which is dropped."""
        for selection in list(self.known.values()):
            selection.memo = {}


_IN_FORCE = _InForce()
_SCOPES: ContextVar[tuple[Selection, ...]] = ContextVar("te_hal_scopes", default=())
registry.REGISTRY.on_change.append(_IN_FORCE.renew_memos)
os.register_at_fork(after_in_child=_IN_FORCE.renew_memos)


def current() -> Selection:
    """The selection in force in this thread (and task)."""
    scopes = _SCOPES.get()
    return scopes[-1] if scopes else _IN_FORCE.process


def current_memo() -> Memo:
    """The memo in force. Another object whenever another choice may result: after ``set_backend``, in and after a
    scope, after a change of policy, a registration, or a fork. Keep it beside a resolved kernel and compare by
    identity to learn whether the kernel is still right.
    """
    scopes = _SCOPES.get()
    return scopes[-1].memo if scopes else _IN_FORCE.process.memo


def set_backend(name: str | None) -> None:
    """Force a backend for the whole process; None returns the choice to the tensors' device.

    Scopes that other threads are in keep what they entered with.

    Raises:
        BackendNotFoundError: unknown; lists what exists and why each is unusable.
        BackendUnavailableError: known but not usable on this machine.
        StateError: called inside ``use_backend`` or ``use_policy``, where it would have no effect.
    """
    _refuse_in_scope("te_hal.set_backend")
    _check_backend(name, "te_hal.set_backend")
    with registry.REGISTRY.lock:
        old = _IN_FORCE.process
        _IN_FORCE.process = _IN_FORCE.selection(name, "te_hal.set_backend", old.policy, old.policy_by)


def use_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Force a backend inside a ``with`` block (or a decorated function), in this thread and task only.

    Blocks nest; the innermost counts. None lifts the forcing inside the block. A thread started inside
    the block does not inherit it.

    Raises:
        BackendNotFoundError, BackendUnavailableError: on entry, as ``set_backend``.
    """
    return _Scope(lambda: _with_backend(name))


def set_policy(policy: Policy) -> None:
    """Put a policy in force for the whole process; ``Policy()`` is the default.

    Raises:
        ArgumentError, BackendNotFoundError, BackendUnavailableError, UnsupportedError: an unknown op or backend;
            an op sent to a backend that is unusable or lacks it.
        StateError: called inside ``use_backend`` or ``use_policy``, where it would have no effect.
    """
    _refuse_in_scope("te_hal.set_policy")
    _check_policy(policy, "te_hal.set_policy")
    with registry.REGISTRY.lock:
        old = _IN_FORCE.process
        _IN_FORCE.process = _IN_FORCE.selection(old.forced, old.forced_by, policy, "te_hal.set_policy")


def use_policy(policy: Policy) -> contextlib.AbstractContextManager[None]:
    """Put a policy in force inside a ``with`` block, in this thread and task only; replaces the outer one.

    Raises:
        ArgumentError, BackendNotFoundError, BackendUnavailableError, UnsupportedError: on entry, as
            ``set_policy``.
    """
    return _Scope(lambda: _with_policy(policy))


def get_policy() -> Policy:
    """The policy in force."""
    return current().policy


def get_backend() -> Backend:
    """The backend in force for ``torch.get_default_device()``.

    Raises:
        BackendNotFoundError, BackendUnavailableError: none, or more than one; says what exists.
    """
    return backend_for(torch.get_default_device())


def forced_backend() -> Backend | None:
    """The backend that set_backend, use_backend or TE_HAL_BACKEND forces; None where the device decides.

    Raises:
        BackendNotFoundError, BackendUnavailableError: TE_HAL_BACKEND names one that cannot be used.
    """
    selection = current()
    if selection.forced is None:
        return None
    return listing.find_usable(selection.forced, selection.forced_by)


def backend_for(device: torch.device, op: str | None = None) -> Backend:
    """The backend in force for tensors on a device, before any fallback.

    Args:
        device: where the tensors are.
        op: if given, a policy's ``per_op`` entry comes first.

    Raises:
        BackendNotFoundError: TE_HAL_BACKEND names one that does not exist.
        BackendUnavailableError: the forced one does not serve the device, nobody claims it, or several do.
    """
    return choose(current(), device, op)


def choose(selection: Selection, device: torch.device, op: str | None) -> Backend:
    """As :func:`backend_for`, under a given selection."""
    sent_to = None if op is None else selection.policy.per_op.get(op)
    if sent_to is not None:
        return _serving(listing.find_usable(sent_to, selection.policy_by), device, selection.policy_by)
    if selection.forced is not None:
        return _serving(listing.find_usable(selection.forced, selection.forced_by), device, selection.forced_by)
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


def reset() -> None:
    """Back to the state after import, for tests.

    The environment's start values are in force again, fallback counts are zero, and every warning can come again.
    Backends found by discovery stay; those added by ``register_backend`` go.

    Raises:
        StateError: called inside ``use_backend`` or ``use_policy``.
    """
    _refuse_in_scope("te_hal.reset")
    with registry.REGISTRY.lock:
        registry.forget_registered()
        _IN_FORCE.renew_memos()
        _IN_FORCE.known.clear()
        _IN_FORCE.process = _IN_FORCE.start()
        fallback.forget()


class _Scope(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """Pushes a selection. Holds no state of its own, so one object may be entered again, and by several threads."""

    def __init__(self, selection: Callable[[], Selection]) -> None:
        self._selection = selection

    def __enter__(self) -> None:
        _SCOPES.set((*_SCOPES.get(), self._selection()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _SCOPES.set(_SCOPES.get()[:-1])


def _with_backend(name: str | None) -> Selection:
    _check_backend(name, "te_hal.use_backend")
    old = current()
    return _IN_FORCE.selection(name, "te_hal.use_backend", old.policy, old.policy_by)


def _with_policy(policy: Policy) -> Selection:
    _check_policy(policy, "te_hal.use_policy")
    old = current()
    return _IN_FORCE.selection(old.forced, old.forced_by, policy, "te_hal.use_policy")


def _check_backend(name: str | None, where: str) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise ArgumentTypeError(
            where, got=f"a {type(name).__name__}", accepted="a backend's name, or None", todo="pass its .name"
        )
    listing.find_usable(name, where)


def _check_policy(policy: Policy, where: str) -> None:
    if not isinstance(policy, Policy):
        raise ArgumentTypeError(
            where, got=f"a {type(policy).__name__}", accepted="a te_hal.Policy", todo="build one, or pass Policy()"
        )
    policies.check_usable(policy, where)


def _serving(backend: Backend, device: torch.device, where: str) -> Backend:
    if backend.takes(device.type):
        return backend
    raise BackendUnavailableError(
        where,
        got=f"tensors on {device} for backend {backend.name!r}",
        accepted=f"tensors on {', '.join(sorted(backend.serves))}",
        todo="move the tensors, or choose a backend that serves their device",
    )


def _refuse_in_scope(where: str) -> None:
    if _SCOPES.get():
        raise StateError(
            where,
            got="a call inside a use_backend or use_policy block",
            accepted="a call outside, as the block decides inside",
            todo="leave the block first, or nest another one",
        )
