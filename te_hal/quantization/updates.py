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
    """States of one thread's forwards that wait for their update, in the order in which they came."""

    def __init__(self) -> None:
        self._forward, self._backward = _Waiting(), _Waiting()

    def add(self, state: Updatable, *, forward: bool) -> None:
        """Note that ``state`` has recorded, or is about to record, an amax."""
        (self._forward if forward else self._backward).add(state)

    def update(self, *, forward: bool) -> None:
        """Update every waiting state of one direction and forget it.

        Where one of them raises (a user's callable), those behind it still wait.
        """
        waiting = self._forward if forward else self._backward
        while waiting.states:
            state = waiting.take()
            if state is not None:
                state.update()

    def clear(self) -> None:
        """Forget every waiting state without an update."""
        self._forward.states.clear()
        self._backward.states.clear()


class _Waiting:
    """States in the order in which they came, each once, held weakly.

    Shared by threads without a lock: each change is one operation on a dict, whole by itself.
    """

    __slots__ = ("_forget", "states")

    def __init__(self) -> None:
        states: dict[weakref.ref[Updatable], None] = {}
        self.states = states
        self._forget = lambda gone: states.pop(gone, None)

    def add(self, state: Updatable) -> None:
        self.states[weakref.ref(state, self._forget)] = None

    def take(self) -> Updatable | None:
        """The first state, now no longer waiting; None if another thread was faster or it is gone."""
        try:
            first = next(iter(self.states))
            del self.states[first]
        except (StopIteration, KeyError, RuntimeError):  # emptied, taken or grown meanwhile: the caller looks again
            return None
        return first()


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
