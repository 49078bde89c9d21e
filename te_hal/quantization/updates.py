"""When delayed-scaling states roll: the queue of states that have recorded an amax since their last update.

Forward states roll when the outermost enabled autocast is left with gradients on, backward states when the
backward of the region's first FP8 module ends (docs/numerics.md, D5). A state that recorded nothing has a zero
amax, which rolls nothing, so only states that recorded something need to be visited. One queue per thread that
runs forwards; a backward uses the queue of its forward, whichever thread autograd runs it in.

States that one op can roll are rolled together, on the backend of their forward.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from te_hal.dispatch import Selection, current_selection, kernel_under
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

_FP32 = torch.float32


class Rolling(NamedTuple):
    """What the op takes of one state (te_hal.ops.update_delayed_scales). The state answers for it: nobody checks."""

    amax_history: torch.Tensor
    scale: torch.Tensor
    fp8_max: float
    margin: int
    amax_compute_algo: str


class Updatable(Protocol):
    """A scaling state that rolls."""

    def update(self) -> None:
        """Roll the history and renew the scales, in place."""

    def rolling(self) -> Rolling | None:
        """What the op takes to do so; None where only :meth:`update` can (a user's callables)."""


class UpdateQueue:
    """States of one thread's forwards that wait for their update, in the order in which they came."""

    def __init__(self) -> None:
        self._forward, self._backward = _Waiting(), _Waiting()

    def add(self, state: Updatable, *, forward: bool, selection: Selection | None = None) -> None:
        """Note that ``state`` has recorded, or is about to record, an amax.

        Args:
            state: what will roll.
            forward: its direction.
            selection: where it shall roll, that of its forward; None: the one in force now.
        """
        (self._forward if forward else self._backward).add(state, selection or current_selection())

    def update(self, *, forward: bool) -> None:
        """Update every waiting state of one direction and forget it: a user's callables one by one, others together.

        Where an update raises (a user's callable), those behind it still wait.
        """
        waiting = self._forward if forward else self._backward
        while waiting.states:
            steps = _take_steps(waiting)
            try:
                while steps:
                    steps.pop(0).run()
            finally:
                for step in steps:
                    for state in step.states:
                        waiting.add(state, step.selection)

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
        states: dict[weakref.ref[Updatable], Selection] = {}
        self.states = states
        self._forget = lambda gone: states.pop(gone, None)

    def add(self, state: Updatable, selection: Selection) -> None:
        self.states[weakref.ref(state, self._forget)] = selection

    def take(self) -> tuple[Updatable, Selection] | None:
        """The first state, now no longer waiting; None if another thread was faster or it is gone."""
        try:
            first = next(iter(self.states))
            selection = self.states.pop(first)
        except (StopIteration, KeyError, RuntimeError):  # emptied, taken or grown meanwhile: the caller looks again
            return None
        state = first()
        return None if state is None else (state, selection)


class _Alone(NamedTuple):
    """A state that rolls by itself."""

    states: tuple[Updatable]
    selection: Selection

    def run(self) -> None:
        self.states[0].update()


class _Together(NamedTuple):
    """States that one op rolls: of one selection, device, margin and window."""

    states: list[Updatable]
    selection: Selection
    rolling: list[Rolling]

    def run(self) -> None:
        first = self.rolling[0]
        settings = {"margin": first.margin, "amax_compute_algo": first.amax_compute_algo}
        if len(self.rolling) == 1:  # a list of one costs more than it saves
            kernel = self._kernel("update_delayed_scale", ("amax_history", "scale", "reduced_amax"))
            kernel(first.amax_history, first.scale, fp8_max=first.fp8_max, **settings)
            return
        kernel = self._kernel("update_delayed_scales", ("amax_histories", "scales", "reduced_amaxes"))
        histories, scales, maxima, _, _ = zip(*self.rolling, strict=True)
        kernel(histories, scales, fp8_maxima=maxima, **settings)

    def _kernel(self, op: str, operands: tuple[str, str, str]) -> Callable[..., Any]:
        first = self.rolling[0]
        device, algo = first.scale.device, first.amax_compute_algo

        def call() -> Call:
            kinds = dict(zip(operands, (_FP32, _FP32, None), strict=True))
            return Call(op, device, kinds, {"amax_compute_algo": algo})

        return kernel_under(self.selection, ("UpdateQueue", op, device, algo), call)


def _take_steps(waiting: _Waiting) -> list[_Alone | _Together]:
    """Everything up to the first state that rolls by itself, which comes last."""
    together: dict[object, _Together] = {}
    while waiting.states:
        taken = waiting.take()
        if taken is None:
            continue
        state, selection = taken
        rolling = state.rolling()
        if rolling is None:
            return [*together.values(), _Alone((state,), selection)]
        kind = selection, rolling.scale.device, rolling.margin, rolling.amax_compute_algo
        step = together.setdefault(kind, _Together([], selection, []))
        step.states.append(state)
        step.rolling.append(rolling)
    return list(together.values())


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
