"""RNGStatesTracker: named random states beside the default one, such as one that differs between tensor-parallel ranks.

``with tracker.fork(name)`` draws from a named state and goes on where its last fork ended; what is drawn outside is not
disturbed by it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.quantization.checkpointed import current_phase
from te_hal.schema.errors import ArgumentError, StateError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from te_hal.quantization.checkpointed import Phase

    #: Device type to the state of its generator, a CPU uint8 tensor.
    States = dict[str, torch.Tensor]

DEFAULT_NAME = "model-parallel-rng"


class RNGStatesTracker:
    """Random states by name, for the CPU's default generator and that of the accelerator's current device.

    Dropout and weight initialisation draw from torch's default generators; a fork exchanges their states. Generators
    belong to the whole process, so that forks in several threads at once would disturb each other.

    Transformer Engine calls it ``CudaRNGStatesTracker``; under that name it is the same class.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, States] = {}
        self.seeds_: set[int] = set()
        self._entered: list[str] = []

    def get_states(self) -> dict[str, States]:
        """Copies of all states: name to device type (``"cpu"``, ...) to a CPU uint8 tensor."""
        return {name: {kind: state.clone() for kind, state in held.items()} for name, held in self.states_.items()}

    def set_states(self, states: dict[str, States]) -> None:
        """Replace all states by copies of ``states``, which has the form that :meth:`get_states` returns.

        A device type that is missing in it keeps drawing from torch's default state inside a fork.

        Raises:
            ArgumentError: another form.
        """
        if not isinstance(states, dict) or not all(map(_is_states, states.values())):
            raise ArgumentError(
                "RNGStatesTracker: set_states",
                got=repr(states)[:200],
                accepted='a dict: name to {"cpu": uint8 tensor, ...}',
                todo="pass what get_states returned",
            )
        self.states_ = {name: {kind: state.clone() for kind, state in held.items()} for name, held in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Start a state.

        Args:
            name: for :meth:`fork`.
            seed: of the state, on every device; one seed serves one name, as equal streams would go unnoticed.

        Raises:
            StateError: the name or the seed is taken.
        """
        for taken, what in ((seed in self.seeds_, f"seed {seed}"), (name in self.states_, f"name {name!r}")):
            if taken:
                raise StateError(
                    "RNGStatesTracker: add",
                    got=f"{what}, which is taken",
                    accepted="a name and a seed of their own for each state",
                    todo="choose another, or call reset() first",
                )
        self.states_[name] = {kind: torch.Generator(kind).manual_seed(seed).get_state() for kind in _device_types()}
        self.seeds_.add(seed)

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Generator[None, None, None]:
        """Draw from a named state inside the ``with`` block; outside, everything is as if it had not been.

        Forks may be nested: a state that is entered a second time goes on where it stands.

        Raises:
            UnknownNameError: no state of that name (also a KeyError).
        """
        if name not in self.states_:
            raise UnknownNameError(
                "RNGStatesTracker: fork",
                got=repr(name),
                accepted=", ".join(map(repr, self.states_)) or "nothing: no state was added",
                todo=f"call add({name!r}, seed) first",
            )
        phase = current_phase()
        if phase is not None and phase.replayed is not None:
            with _drawing_again(phase, self, f"RNGStatesTracker: fork({name!r})"):
                yield
            return
        active = self._entered[-1] if self._entered else None
        if active == name:
            _note_draw(phase, self, goes_on=True)
            yield
            return
        outside = _exchange(self.states_[name])
        if active is not None:
            self.states_[active] = outside
        self._entered.append(name)
        try:
            _note_draw(phase, self)
            yield
        finally:
            self._entered.pop()
            self.states_[name] = _exchange(outside if active is None else self.states_[active])


class _Draw(NamedTuple):
    """A fork in the first run of a checkpointed function.

    Attributes:
        owner: the tracker.
        states: what generators stood at as it was entered; None where it went on with the stream in force.
        what: for messages.
    """

    owner: object
    states: States | None
    what: str = "a fork of an RNG tracker"


def _note_draw(phase: Phase | None, owner: object, *, goes_on: bool = False) -> None:
    if phase is not None and phase.recorders:
        draw = _Draw(owner, None if goes_on else _states_now())
        for recorder in phase.recorders:
            recorder.add(draw)


@contextmanager
def _drawing_again(phase: Phase, owner: object, what: str) -> Generator[None, None, None]:
    """Draw what the first run drew; afterwards everything is as if nothing had been, unless the stream goes on."""
    draw = phase.replayed.replay(phase.run, owner, what)  # type: ignore[union-attr] # the caller has looked
    for recorder in phase.recorders:
        recorder.add(draw)
    if draw.states is None:
        yield
        return
    before = _exchange(draw.states)
    try:
        yield
    finally:
        _exchange(before)


@contextmanager
def _forked_elsewhere(fork: AbstractContextManager[None], tracker: object) -> Generator[None, None, None]:
    """The fork of a tracker that knows nothing of checkpointed functions."""
    phase = current_phase()
    if phase is not None and phase.replayed is not None:
        with _drawing_again(phase, tracker, "get_rng_state_tracker"):
            yield
        return
    with fork:
        _note_draw(phase, tracker)
        yield


#: Transformer Engine's name.
CudaRNGStatesTracker = RNGStatesTracker


def forked(get_tracker: Callable[[], Any] | None, name: str | None = None) -> AbstractContextManager[None]:
    """The fork of a module's tracker, None: under the tracker's default name; nothing changes without a tracker.

    Raises:
        ArgumentError: ``get_tracker`` gives what has no fork.
    """
    if get_tracker is None:
        return nullcontext()
    tracker = get_tracker()
    if not callable(getattr(tracker, "fork", None)):
        raise ArgumentError(
            "get_rng_state_tracker",
            got=f"a function that gives {tracker!r}",
            accepted="one that gives a tracker, with a method fork(name)",
            todo="have it return a te.RNGStatesTracker, or leave it out",
        )
    fork: AbstractContextManager[None] = tracker.fork() if name is None else tracker.fork(name)
    return fork if isinstance(tracker, RNGStatesTracker) else _forked_elsewhere(fork, tracker)


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _exchange(states: States) -> States:
    """Put states into torch's default generators, in place; returns those that were there."""
    before = {}
    for kind, state in states.items():
        before[kind] = _generators(kind).get_rng_state()
        _generators(kind).set_rng_state(state)
    return before


def _states_now() -> States:
    return {kind: _generators(kind).get_rng_state() for kind in _device_types()}


def _generators(kind: str) -> Any:  # noqa: ANN401 - a module of torch
    return torch.random if kind == "cpu" else torch.get_device_module(kind)


def _is_states(held: object) -> bool:
    return isinstance(held, dict) and all(
        isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.device.type == "cpu"
        for state in held.values()
    )
