"""Forwards that torch.utils.checkpoint computes twice: in which of the two a call is, and what the first one recorded.

torch runs the function of a checkpoint in the forward, keeping nothing, and again in the backward. Nothing of te_hal is
asked in between, and torch is not patched: a call finds out by looking at the functions that are running. That costs a
look at the stack, and only where gradients are off, hooks for saved tensors are set, or a backward runs.

What the first run recorded hangs on the object that torch keeps for the second (the context of CheckpointFunction, or
the frame object of the form without reentrance), and goes with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from types import FrameType

_FILE = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")
_ATTRIBUTE = "_te_hal_recorded"
_NO_GRAPH_TASK = -1


class Entry(Protocol):
    """One thing that the first run recorded."""

    @property
    def what(self) -> str:
        """Names whose it is, for messages."""
        ...

    @property
    def owner(self) -> object:
        """Whose it is."""
        ...


class Recorded:
    """What the first run of a checkpointed function did, in order; every further run goes through it from the start."""

    __slots__ = ("_entries", "_next", "_run")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._run: object = None
        self._next = 0

    def add(self, entry: Entry) -> None:
        """Record what happened next."""
        self._entries.append(entry)

    def replay(self, run: object, owner: object, what: str) -> Any:  # noqa: ANN401 - an Entry of the owner's making
        """What the first run recorded at this place.

        Args:
            run: tells this run from others.
            owner: who asks.
            what: names it, for the message.

        Raises:
            StateError: the first run did something else at this place.
        """
        if self._run != run:
            self._run, self._next = run, 0
        found = self._entries[self._next] if self._next < len(self._entries) else None
        if found is None or found.owner is not owner:
            raise StateError(
                f"{what}: recompute",
                got="a call that the checkpointed function did not make at this place in the forward, but "
                + ("nothing more" if found is None else f"one of {found.what}"),
                accepted="the same calls in the same order",
                todo="let nothing that changes between forward and backward decide which modules run",
            )
        self._next += 1
        return found


#: Tells the innermost hooks on saved tensors, which a checkpointed function always has; torch 2.7 cannot be asked.
_TOP_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001 - see below


class Phase(NamedTuple):
    """Where in checkpointed functions a call is.

    Attributes:
        recorders: those of functions that run for the first time, innermost first.
        replayed: that of the innermost function that runs again.
        run: tells this further run from others.
        expects_backward: gradients are off only because a function will be run again with them.
        in_backward: a backward is running.
    """

    recorders: tuple[Recorded, ...] = ()
    replayed: Recorded | None = None
    run: object = None
    expects_backward: bool = False
    in_backward: bool = False


def is_in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK  # noqa: SLF001 - torch has no public question


def current_phase() -> Phase | None:
    """Where the caller is; None: neither in a checkpointed function nor in a backward."""
    in_backward = is_in_backward()
    if not in_backward and torch.is_grad_enabled() and _TOP_HOOKS is not None and _TOP_HOOKS(False) is None:
        return None
    found = _look(sys._getframe(1), in_backward=in_backward)  # noqa: SLF001 - nor for this
    return found if in_backward or found.recorders or found.replayed is not None else None


def _look(frame: FrameType | None, *, in_backward: bool) -> Phase:
    """Walk from the innermost function outwards, up to the first that runs again."""
    recorders: list[Recorded] = []
    expects = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FILE and code.co_name in _PLACES:
            place = _PLACES[code.co_name](frame.f_locals)
            if place is not None:
                keeper, run, with_gradients = place
                if run is not None:
                    return Phase(tuple(recorders), getattr(keeper, _ATTRIBUTE, None), run, expects, in_backward)
                expects = expects or with_gradients
                recorders.append(_recorded(keeper))
        frame = frame.f_back
    return Phase(tuple(recorders), None, None, expects, in_backward)


def _recorded(keeper: object) -> Recorded:
    found: Recorded | None = getattr(keeper, _ATTRIBUTE, None)
    if found is None:
        found = Recorded()
        setattr(keeper, _ATTRIBUTE, found)
    return found


#: What torch keeps, what tells a further run from others (None: the first), and whether gradients will come though off.
_Place = tuple[object, object, bool]


def _reentrant_first(names: dict[str, Any]) -> _Place | None:
    """In CheckpointFunction.forward, which runs without gradients."""
    if "run_function" not in names:
        return None
    wanted = any(isinstance(given, torch.Tensor) and given.requires_grad for given in names["args"])
    return names["ctx"], None, wanted


def _reentrant_again(names: dict[str, Any]) -> _Place | None:
    """In CheckpointFunction.backward, which runs the function and then a backward of its own, with others' hooks."""
    if "detached_inputs" not in names or "outputs" in names:
        return None
    return names["ctx"], torch._C._current_graph_task_id(), False  # noqa: SLF001 - as above


def _other_first(names: dict[str, Any]) -> _Place | None:
    """In checkpoint(), between the two halves of a generator that holds torch's frame object."""
    suspended = getattr(names.get("gen"), "gi_frame", None)
    keeper = None if suspended is None else suspended.f_locals.get("new_frame")
    return None if keeper is None else (keeper, None, False)


def _other_again(names: dict[str, Any]) -> _Place | None:
    """In the hook that unpacks a saved tensor by running the function."""
    return (names["frame"], names["gid"], False) if "gid" in names and "frame" in names else None


_PLACES = {
    "forward": _reentrant_first,
    "backward": _reentrant_again,
    "checkpoint": _other_first,
    "unpack_hook": _other_again,
}
