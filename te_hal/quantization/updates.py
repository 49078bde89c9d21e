"""When delayed-scaling states roll: the queue of states that have recorded an amax since their last update.

Forward states roll when the outermost enabled autocast is left with gradients on, backward states when the
backward of the region's first FP8 module ends (docs/numerics.md, D5). A state that recorded nothing has a zero
amax, which rolls nothing, so only states that recorded something need to be visited. One queue per thread that
runs forwards; a backward uses the queue of its forward, whichever thread autograd runs it in.
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
    """States of one thread's forwards that wait for their update."""

    def __init__(self) -> None:
        self._waiting: dict[bool, weakref.WeakSet[Updatable]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}

    def add(self, state: Updatable, *, forward: bool) -> None:
        """Note that ``state`` has recorded, or is about to record, an amax."""
        self._waiting[forward].add(state)

    def update(self, *, forward: bool) -> None:
        """Update every waiting state of one direction and forget it."""
        waiting = self._waiting[forward]
        for state in list(waiting):
            state.update()
        waiting.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.queue = UpdateQueue()


_per_thread = _PerThread()


def current_queue() -> UpdateQueue:
    """The queue of the calling thread."""
    return _per_thread.queue


def discard_waiting() -> None:
    """Forget what waits in the calling thread (for tests and ``reset``)."""
    _per_thread.queue = UpdateQueue()
