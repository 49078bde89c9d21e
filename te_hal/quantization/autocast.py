"""autocast: which modules run in FP8, under which recipe, and the moments at which scaling states roll."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.quantization.amax_reduction import check_group, check_single_process
from te_hal.quantization.availability import get_default_recipe
from te_hal.quantization.block_arguments import check_block
from te_hal.quantization.block_decorator import BlockDecorator
from te_hal.quantization.checkpointed import current_phase
from te_hal.quantization.recipe_support import check_forced_backend
from te_hal.quantization.scaling_state import check_is_built
from te_hal.quantization.updates import UpdateQueue, current_queue
from te_hal.recipe import DelayedScaling, Recipe
from te_hal.schema.errors import StateError
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch.distributed import ProcessGroup

_GRAPH = {"_graph": "make_graphed_callables captures modules, and enters an autocast of its own while it does"}
_REFUSED = declare("autocast", {"_graph": False}, _GRAPH)


class Region:
    """One stay inside an outermost enabled autocast.

    Its first FP8 module with a backward updates the backward states.

    Attributes:
        queue: states that wait for their update.
        met_module: whether a module of te_hal has run.
    """

    __slots__ = ("_first_taken", "met_module", "queue")

    def __init__(self, queue: UpdateQueue) -> None:
        self.queue = queue
        self._first_taken = False
        self.met_module = False

    def take_first(self) -> bool:
        """Whether the caller is the first to ask."""
        first = not self._first_taken
        self._first_taken = True
        return first


class Frame(NamedTuple):
    """What an autocast puts in force.

    Attributes:
        enabled, calibrating: as given.
        recipe: None outside of any.
        region: the outermost enabled one; None outside of any.
        record: inside a checkpointed function, what the module that runs keeps for its recompute, or kept.
        again: the function runs for the second time: everything but the values happened in the first.
    """

    enabled: bool
    calibrating: bool
    recipe: Recipe | None
    region: Region | None
    record: Any = None
    again: bool = False


#: Outside of any autocast.
_OFF = Frame(enabled=False, calibrating=False, recipe=None, region=None)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_per_thread = _PerThread()


def current_frame() -> Frame:
    """The innermost autocast of the calling thread; an off frame where there is none."""
    frames = _per_thread.frames
    return frames[-1] if frames else _OFF


@contextmanager
def frame_in_force(frame: Frame) -> Iterator[None]:
    """Have a frame in force inside a ``with`` block, in this thread, as the autocast that it comes from would."""
    frames = _per_thread.frames
    frames.append(frame)
    try:
        yield
    finally:
        _remove(frames, frame)


def note_module() -> None:
    """Note that a module of te_hal runs now; modules that quantize note it as they begin."""
    region = current_frame().region
    if region is not None:
        region.met_module = True


class autocast(BlockDecorator):  # noqa: N801 - Transformer Engine's spelling
    """Run te_hal modules in FP8 inside the ``with`` block, or in every call of a function that it decorates.

    Nesting is allowed, off inside on and on inside off too; what was in force before is in force again afterwards,
    also after an exception. On leaving the outermost enabled block with gradients on, the forward scaling states that
    recorded an amax are updated, also after an exception. State is per thread. One object may be entered again after
    it was left, not twice at once; as a decorator it makes a block of its own for each call. Leaving one in which no
    te_hal module ran warns, once in a process.

    Args:
        enabled: whether modules quantize.
        calibrating: with ``enabled=False``: modules run unquantized and record the largest magnitude of inputs and
            weights in row 0 of the amax history, where the next enabled block's update finds it.
        recipe: None means :func:`get_default_recipe`.
        amax_reduction_group: processes over which delayed scaling takes amax; None: all. Several are refused for
            now, unless the recipe says ``reduce_amax=False``.
        _graph: capture into a device graph; True is refused.

    Raises:
        ArgumentTypeError: a flag is no bool, ``recipe`` no recipe, ``amax_reduction_group`` no process group.
        UnsupportedError: the forced backend lacks the recipe; several processes. Nothing has changed then.
        StateError: this object is already entered.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
        _graph: bool = False,
    ) -> None:
        check_block("autocast", {"enabled": enabled, "calibrating": calibrating, "_graph": _graph}, recipe)
        refuse("autocast", {"_graph": _graph}, _REFUSED)
        check_group("autocast: amax_reduction_group", amax_reduction_group)
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._entered: tuple[list[Frame], Frame] | None = None

    def _fresh(self) -> autocast:
        made = copy.copy(self)
        made._entered = None  # noqa: SLF001 - of this class
        return made

    def __enter__(self) -> None:
        if self._entered is not None:
            raise StateError(
                "autocast",
                got="an object that is already entered",
                accepted="one use at a time",
                todo="make a new te.autocast(...) for the inner block",
            )
        recipe = self.recipe
        if self.enabled or self.calibrating:
            recipe = get_default_recipe() if recipe is None else recipe
            check_is_built(recipe)
            if self.enabled:  # calibrating needs nothing but amax
                check_forced_backend(recipe)
            if isinstance(recipe, DelayedScaling) and recipe.reduce_amax:
                check_single_process("autocast: amax_reduction_group", self.amax_reduction_group)
        frames = _per_thread.frames
        around = _innermost_enabled(frames) if frames else None
        region = Region(current_queue()) if around is None else around.region
        frame = Frame(self.enabled, self.calibrating and not self.enabled, recipe, region)
        frames.append(frame)
        self._entered = frames, frame

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is None:
            return
        frames, frame = self._entered
        self._entered = None
        _remove(frames, frame)
        outermost = frame.enabled and (not frames or _innermost_enabled(frames) is None)
        if outermost and frame.region is not None and _rolls():
            frame.region.queue.update(forward=True)
        if outermost and frame.region is not None and not frame.region.met_module and error is None:
            _warn_that_nothing_quantizes()


def _rolls() -> bool:
    """Whether forward states roll as a block is left: with gradients, once for a function that is computed twice."""
    phase = current_phase()
    if phase is None:
        return torch.is_grad_enabled()
    return phase.replayed is None and (torch.is_grad_enabled() or phase.expects_backward)


class _Once:
    """Whether the warning was given in this process."""

    given = False


def _warn_that_nothing_quantizes() -> None:
    if not _Once.given:
        _Once.given = True
        warnings.warn(
            "te.autocast: no module of te_hal ran inside, so it changed nothing; FP8 is for te.Linear, "
            "te.LayerNormLinear, te.LayerNormMLP, te.TransformerLayer in the place of torch's modules. Said once.",
            stacklevel=3,
        )


def _innermost_enabled(frames: list[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if frame.enabled), None)


def _remove(frames: list[Frame], frame: Frame) -> None:
    """Take out this very frame, also where blocks are left out of order (generators) or after a reset."""
    for place in reversed(range(len(frames))):
        if frames[place] is frame:
            del frames[place]
            return


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    _graph: bool = False,
) -> autocast:
    """The older spelling of :class:`autocast`; same meaning, other argument names."""
    return autocast(
        enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group, _graph=_graph
    )


def leave_every_autocast() -> None:
    """Forget the calling thread's, and what has been said once."""
    _per_thread.frames.clear()
    _Once.given = False
