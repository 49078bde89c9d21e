"""The selection in force: a forced backend, a policy and their memo; process-wide or in a scope."""

from __future__ import annotations

import contextlib
import os
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import calls, determinism, fallback, listing, policy_check, policy_source, registry
from te_hal.dispatch.policy import Policy
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentTypeError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from te_hal.dispatch.calls import Count
    from te_hal.dispatch.observer import Observer

    #: By kind of call: the kernel, and where calls of it are counted.
    Memo = dict[tuple[object, ...], tuple[Callable[..., Any], Count]]
    _Key = tuple[str | None, str, Policy, str, Observer | None]


class Selection:
    """One combination of forced backend, policy and observer, with who set the first two, and the kernels found.

    Calls under one that is not ``counted`` stay out of te_hal.report: they belong to no run of the user's.
    """

    __slots__ = ("__weakref__", "counted", "forced", "forced_by", "memo", "observer", "policy", "policy_by")

    def __init__(
        self,
        forced: str | None,
        forced_by: str,
        policy: Policy,
        policy_by: str,
        observer: Observer | None = None,
        *,
        counted: bool = True,
    ) -> None:
        self.counted = counted
        self.forced = forced
        self.forced_by = forced_by
        self.policy = policy
        self.policy_by = policy_by
        self.observer = observer
        self.memo: Memo = {}


#: Selections that are remembered after their block; a program that makes policies without end forgets the oldest.
_REMEMBERED = 64


class _InForce:
    """The process-wide selection, and the latest selections there have been.

    A selection that comes back finds its memo again, so a loop over ``use_backend`` resolves each op once.
    """

    def __init__(self) -> None:
        self.known: dict[_Key, Selection] = {}
        # Those in force somewhere among them, also where they are forgotten above.
        self.alive: weakref.WeakSet[Selection] = weakref.WeakSet()
        self.process = self.start()

    def start(self) -> Selection:
        """What the environment asks for. Backends' names are not checked here: a wrong one is an error at first use."""
        return self.selection(ENVIRONMENT.backend, "TE_HAL_BACKEND", *policy_source.start_policy())

    def selection(
        self, forced: str | None, forced_by: str, policy: Policy, policy_by: str, observer: Observer | None = None
    ) -> Selection:
        key = (forced, forced_by, policy, policy_by, observer)
        found = self.known.get(key)
        if found is not None:
            return found
        with registry.REGISTRY.lock:
            found = self.known.get(key)
            if found is None:
                if len(self.known) >= _REMEMBERED:
                    del self.known[next(iter(self.known))]
                found = self.known[key] = Selection(*key)
                self.alive.add(found)
        return found

    def forget_observer(self, observer: Observer) -> None:
        """Let go of what was bound for an observer that has seen enough."""
        with registry.REGISTRY.lock:
            self.known = {key: found for key, found in self.known.items() if found.observer is not observer}

    def renew_memos(self) -> None:
        """A new dict each: a call that is being resolved right now stores into the old one, which is dropped."""
        with registry.REGISTRY.lock:
            for selection in self.alive:
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
    """The memo in force: another object whenever another choice may result.

    That is so after ``set_backend``, in a scope and after it, after a change of policy, a registration and a fork.
    Whoever keeps a resolved kernel keeps this object beside it, and compares by identity to learn whether the
    kernel is still the right one.
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
    _check_backend(name, "te_hal.set_backend", afresh=True)
    with registry.REGISTRY.lock:
        old = _IN_FORCE.process
        _IN_FORCE.process = _IN_FORCE.selection(name, "te_hal.set_backend", old.policy, old.policy_by)


def use_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Force a backend inside a ``with`` block (or a decorated function), in this thread and task only.

    Blocks nest; the innermost counts. None lifts the forcing inside the block. A thread started inside the block
    does not inherit it, and neither do the threads in which autograd runs backward on a device: what runs there
    records its backend in forward.

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


def in_force(selection: Selection) -> contextlib.AbstractContextManager[None]:
    """Have an earlier selection in force again inside a ``with`` block, for a forward that is computed again."""
    return _Scope(lambda: selection)


@contextlib.contextmanager
def use_observer(observer: Observer | None) -> Iterator[None]:
    """Have every kernel that is bound inside a ``with`` block pass through an observer, in this thread and task only.

    Choice and fallback stay what they were; ``use_backend`` and ``use_policy`` inside the block keep the observer.
    Plans and memos made outside the block serve outside it only, so nothing is left behind.

    Args:
        observer: gives what is bound instead of a kernel; replaces the outer block's. None: what is bound inside is not
            observed.
    """

    def observed() -> Selection:
        old = current()
        return _IN_FORCE.selection(old.forced, old.forced_by, old.policy, old.policy_by, observer)

    try:
        with _Scope(observed):
            yield
    finally:
        if observer is not None:
            _IN_FORCE.forget_observer(observer)


def get_policy() -> Policy:
    """The policy in force."""
    return current().policy


def reset() -> None:
    """Back to the state after import, for tests.

    The environment's start values are in force again, set_deterministic is off, counts are zero, and every warning can
    come again.
    Backends found by discovery stay; those added by ``register_backend`` go.

    Raises:
        StateError: called inside ``use_backend`` or ``use_policy``.
    """
    _refuse_in_scope("te_hal.reset")
    with registry.REGISTRY.lock:
        registry.forget_registered()
        _IN_FORCE.renew_memos()
        _IN_FORCE.process = _IN_FORCE.start()
        determinism.forget()
        fallback.forget()
        calls.forget()


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
    return _IN_FORCE.selection(name, "te_hal.use_backend", old.policy, old.policy_by, old.observer)


def _with_policy(policy: Policy) -> Selection:
    _check_policy(policy, "te_hal.use_policy")
    old = current()
    return _IN_FORCE.selection(old.forced, old.forced_by, policy, "te_hal.use_policy", old.observer)


def _check_backend(name: str | None, where: str, *, afresh: bool = False) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise ArgumentTypeError(
            where, got=f"a {type(name).__name__}", accepted="a backend's name, or None", todo="pass its .name"
        )
    listing.find_usable(name, where, afresh=afresh)


def _check_policy(policy: Policy, where: str) -> None:
    if not isinstance(policy, Policy):
        raise ArgumentTypeError(
            where, got=f"a {type(policy).__name__}", accepted="a te_hal.Policy", todo="build one, or pass Policy()"
        )
    policy_check.check_usable(policy, where)


def _refuse_in_scope(where: str) -> None:
    if _SCOPES.get():
        raise StateError(
            where,
            got="a call inside a use_backend or use_policy block",
            accepted="a call outside, as the block decides inside",
            todo="leave the block first, or nest another one",
        )
