"""Counts and announces the calls that another backend took over."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class FallbackWarning(UserWarning):
    """An op runs on another backend than the one in force, as the policy allows. Comes once per op."""


class _Record:
    """What happened since the start or the last reset."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: dict[tuple[str, str, str], int] = {}
        self.announced: set[str] = set()

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock in the parent does not exist here."""
        self.lock = threading.Lock()


_RECORD = _Record()
os.register_at_fork(after_in_child=_RECORD.renew_lock)


def fallback_report() -> dict[tuple[str, str, str], int]:
    """How many calls ran elsewhere, by (op, backend in force, backend that ran it). A copy."""
    with _RECORD.lock:
        return dict(_RECORD.counts)


def forget() -> None:
    """Counts back to zero; each op is announced again."""
    with _RECORD.lock:
        _RECORD.counts.clear()
        _RECORD.announced.clear()


def counted(op: str, source: str, target: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, counting its calls under (op, source, target). The memo holds this wrapper, so every call counts.

    The lock is affordable here: a fallback is the slow path by definition.
    """
    key = (op, source, target)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what the op's schema says
        with _RECORD.lock:
            _RECORD.counts[key] = _RECORD.counts.get(key, 0) + 1
        return kernel(*args, **kwargs)

    return run


def announce(op: str, source: str, target: str, reason: str) -> None:
    """Warn, once per op."""
    with _RECORD.lock:
        if op in _RECORD.announced:
            return
        _RECORD.announced.add(op)
    warnings.warn(
        f"{op}: runs on backend {target!r}, as the policy allows, because {source!r} refused: {reason}; "
        "te_hal.fallback_report() has the counts",
        FallbackWarning,
        stacklevel=2,
    )
