"""When delayed-scaling states roll: the queue of states that have recorded an amax since their last update.

Forward states roll when the outermost enabled autocast is left with gradients on, backward states when the
backward of the region's first FP8 module ends (docs/numerics.md, D5). A state that recorded nothing has a zero
amax, which rolls nothing, so only states that recorded something need to be visited. One queue per thread that
runs forwards; a backward uses the queue of its forward, whichever thread autograd runs it in, hence the lock.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Updatable(Protocol):
    """A scaling state that rolls."""

    def update(self) -> None:
        """Roll the history and renew the scales, in place."""


class UpdateQueue:
    """States of one thread's forwards that wait for their update, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bool, weakref.WeakKeyDictionary[Updatable, None]] = {
            forward: weakref.WeakKeyDictionary() for forward in (True, False)
        }

    def add(self, state: Updatable, *, forward: bool) -> None:
        """Note that ``state`` has recorded, or is about to record, an amax."""
        with self._lock:
            self._waiting[forward][state] = None

    def update(self, *, forward: bool) -> None:
        """Update every waiting state of one direction and forget it.

        Where one of them raises (a user's callable), those behind it still wait.
        """
        while (state := self._take(forward=forward)) is not None:
            state.update()

    def clear(self) -> None:
        """Forget every waiting state without an update."""
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()

    def _take(self, *, forward: bool) -> Updatable | None:
        with self._lock:
            waiting = self._waiting[forward]
            state = next(iter(waiting), None)
            if state is not None:
                del waiting[state]
            return state


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.queue = UpdateQueue()


_per_thread = _PerThread()


def current_queue() -> UpdateQueue:
    """The queue of the calling thread."""
    return _per_thread.queue


def discard_waiting() -> None:
    """Forget what waits in the calling thread (for tests and ``reset``)."""
    _per_thread.queue.clear()
