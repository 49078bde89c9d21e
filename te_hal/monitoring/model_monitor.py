"""te_hal.monitor: numbers about a model's FP8 while it trains, in any training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.monitoring.history import History
from te_hal.monitoring.nonfinite import MODES, REPORT, Guard, Place
from te_hal.monitoring.statistics import of_plain
from te_hal.monitoring.watching import watch
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from te_hal.monitoring.statistics import Statistics

_FORMAT = 1


class Monitor:
    """Watches a model; made by :func:`monitor`. Not for several threads that train at once."""

    def __init__(self, model: torch.nn.Module, every: int, nonfinite: str, steps_done: int) -> None:
        self._model, self._every, self._steps_done = model, every, steps_done
        self._guard, self._history = Guard(nonfinite), History()
        self._ends: list[Callable[[], None]] = []
        self._closed = False
        try:
            for name, module in model.named_modules():
                self._ends += watch(name, module, self._look)
        except StateError:
            self.close()
            raise

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer call :meth:`step` before each of its own steps."""
        self._ends.append(optimizer.register_step_pre_hook(lambda *_: self.step()).remove)

    def step(self) -> None:
        """A step's gradients are complete: call this after its last backward, before the optimizer changes anything.

        Raises:
            NonFiniteError: under ``nonfinite="raise"``, a parameter's gradient is not finite.
            StateError: the monitor is closed.
        """
        if self._closed:
            raise StateError(
                "Monitor.step",
                got="a closed monitor",
                accepted="one that watches",
                todo="make a new one with te_hal.monitor(model)",
            )
        step = self._steps_done + 1
        if self._observed or self._guard.active:
            norms = self._look_at_gradients()
            if self._observed:
                self._history.end_step(step, torch.stack(norms).norm().item() if norms else 0.0)
        self._guard.end_step(step)
        self._steps_done = step

    def history(self) -> dict[str, Any]:
        """Everything recorded, as lists, dicts, numbers and strings (docs/monitor.md); a copy."""
        return {
            "format": _FORMAT,
            "every": self._every,
            "steps": list(self._history.steps),
            "gradient_norm": list(self._history.gradient_norm),
            "tensors": self._history.tensors(),
            "nonfinite": self.nonfinite,
        }

    @property
    def nonfinite(self) -> dict[str, Any] | None:
        """The first NaN or Inf: step, value, module, kind (its class), role, op and direction; None without any."""
        return None if self._guard.found is None else dict(self._guard.found)

    @property
    def _observed(self) -> bool:
        """Whether the step under way goes into the history: the first one and each multiple of ``every``."""
        step = self._steps_done + 1
        return step == 1 or step % self._every == 0

    def close(self) -> None:
        """Stop watching; the history stays. What a step under way has shown goes to ``nonfinite`` only."""
        if self._closed:
            return
        self._closed = True
        for end in self._ends:
            end()
        self._history.discard_step()
        self._guard.end_step(self._steps_done + 1)

    def __enter__(self) -> Monitor:  # noqa: PYI034 - typing has Self from Python 3.11 on
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @torch.no_grad()
    def _look(self, place: Place, statistics: Callable[[bool], Statistics], recorded: bool) -> None:
        """A tensor was seen; its statistics are computed only where somebody wants them."""
        record = recorded and self._observed
        if self._closed or not (record or self._guard.active):
            return
        seen = statistics(record)
        if record:
            self._history.add(place.module, place.role, seen)
        self._guard.look(place, seen, self._steps_done + 1)

    @torch.no_grad()
    def _look_at_gradients(self) -> list[torch.Tensor]:
        """L2 norms, in fp32, of all parameters' gradients, those in main_grad included."""
        norms: list[torch.Tensor] = []
        for name, parameter in self._model.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.coalesce().values()
            if gradient is None or not gradient.numel():
                continue
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            norms.append(norm if not norms else norm.to(norms[0].device))
            if self._guard.active:
                self._guard.look(self._gradient_place(name), of_plain(gradient), self._steps_done + 1)
        return norms

    def _gradient_place(self, parameter: str) -> Place:
        module, _, name = parameter.rpartition(".")
        kind = type(self._model.get_submodule(module)).__name__
        return Place(module, kind, f"gradient of {name}", "wgrad", "backward")


def monitor(
    model: torch.nn.Module,
    every: int = 10,
    nonfinite: str = REPORT,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps_done: int = 0,
) -> Monitor:
    """Watch a model while it trains: amax, scale, clipped and flushed shares of each tensor that is quantized.

    Nothing that is computed changes by a bit. Modules in eval mode (``model.eval()``) are left out, quantizers
    included, so that an evaluation between two steps mixes with none of them. A model may have one monitor at a time;
    copies and pickles of it have none.

    Args:
        model: any module; what it holds now is watched.
        every: the first step and each multiple of this are recorded.
        nonfinite: what the first NaN or Inf does, in any step: "report" keeps the facts and warns once, when the step
            ends; "raise" raises where it is; "ignore" looks for none.
        optimizer: calls ``step()`` before each of its own steps. None: the loop calls ``step()``.
        steps_done: steps before this one, for a training that goes on.

    Returns:
        The monitor: a context manager with ``step()``, ``history()``, ``nonfinite`` and ``close()``.

    Raises:
        ArgumentTypeError: no module, no optimizer.
        ArgumentError: a number or name that is not accepted.
        StateError: another monitor watches one of the modules.
    """
    _check_type("model", model, torch.nn.Module)
    if optimizer is not None:
        _check_type("optimizer", optimizer, torch.optim.Optimizer)
    _check("every", every, _is_count(every, 1), "an integer of at least 1")
    _check("steps_done", steps_done, _is_count(steps_done, 0), "an integer of at least 0")
    _check("nonfinite", nonfinite, nonfinite in MODES, ", ".join(map(repr, MODES)))
    made = Monitor(model, every, nonfinite, steps_done)
    if optimizer is not None:
        made.follow(optimizer)
    return made


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(name: str, value: object, right: bool, accepted: str) -> None:
    if not right:
        raise ArgumentError(f"te_hal.monitor: {name}", got=repr(value), accepted=accepted, todo="correct the argument")


def _check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise ArgumentTypeError(
            f"te_hal.monitor: {name}",
            got=f"a {type(value).__name__}",
            accepted=f"a {wanted.__module__}.{wanted.__qualname__}",
            todo=f"pass the {name} that is trained",
        )
