"""What exists and why it is unusable: for list_backends, and for every error that a wrong choice raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import registry
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError

if TYPE_CHECKING:
    from te_hal.schema.backend import Backend


def find(name: str, where: str) -> Backend:
    """The backend of that name.

    Args:
        name: what was asked for.
        where: who asked, for the message: a function or an environment variable.

    Raises:
        BackendNotFoundError: unknown.
        BackendUnavailableError: known, but it failed to load.
    """
    known = registry.tables()
    backend = known.backends.get(name)
    if backend is not None:
        return backend
    if name in known.failures:
        raise _unavailable(name, where, known.failures[name])
    raise BackendNotFoundError(where, got=f"backend {name!r}", accepted=say_all(), todo="choose one of the usable ones")


def find_usable(name: str, where: str, *, afresh: bool = False) -> Backend:
    """As :func:`find`, and the backend works on this machine.

    Args:
        name: what was asked for.
        where: who asked.
        afresh: ask the backend even if its answer is known.

    Raises:
        BackendNotFoundError: unknown.
        BackendUnavailableError: failed to load, or says that it cannot be used here.
    """
    backend = find(name, where)
    answer = registry.ask_usable(backend, afresh=afresh)
    if not answer:
        raise _unavailable(name, where, answer.sentence)
    return backend


def say_all() -> str:
    """Every known backend with its state, for error messages."""
    known = registry.tables()
    parts = {name: f"{name} ({reason})" for name, reason in known.failures.items()}
    for name, backend in known.backends.items():
        answer = registry.ask_usable(backend)
        parts[name] = f"{name} (usable)" if answer else f"{name} (unusable: {answer.sentence})"
    return "; ".join(parts[name] for name in sorted(parts))


def _unavailable(name: str, where: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        where,
        got=f"backend {name!r}, which cannot be used here: {reason}",
        accepted=say_all(),
        todo="choose one of the usable ones, or remove the cause",
    )
