"""Announces, and reports, the calls that another backend took over."""

from __future__ import annotations

import os
import threading
import warnings

from te_hal.dispatch.calls import call_counts
from te_hal.dispatch.runs import Runs


class FallbackWarning(UserWarning):
    """An op runs on another backend than the one in force, as the policy allows. Comes once per op."""


class _Announced:
    """Ops that have been announced since the start or the last reset."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ops: set[str] = set()

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock in the parent does not exist here."""
        self.lock = threading.Lock()


_ANNOUNCED = _Announced()
os.register_at_fork(after_in_child=_ANNOUNCED.renew_lock)


def fallback_report() -> dict[tuple[str, str, str], int]:
    """How many calls ran elsewhere, by (op, backend in force, backend that ran it). :func:`te_hal.report` has all."""
    return {(c.op, c.instead_of, c.backend): c.calls for c in call_counts() if c.runs is Runs.FALLBACK}


def forget() -> None:
    """Each op is announced again."""
    with _ANNOUNCED.lock:
        _ANNOUNCED.ops.clear()


def announce(op: str, source: str, target: str, reason: str) -> None:
    """Warn, once per op."""
    with _ANNOUNCED.lock:
        if op in _ANNOUNCED.ops:
            return
        _ANNOUNCED.ops.add(op)
    warnings.warn(
        f"{op}: runs on backend {target!r}, as the policy allows, because {source!r} refused: {reason}; "
        "te_hal.fallback_report() has the counts",
        FallbackWarning,
        stacklevel=2,
    )
