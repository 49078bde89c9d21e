"""te_hal.shadow: what the user sees of it."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from te_hal.dispatch import Policy, Selection, use_backend, use_observer
from te_hal.schema.errors import ArgumentError, BackendUnavailableError, StateError, UnsupportedError
from te_hal.shadowing.call_file import SavedCall, call_text, versions, write_call
from te_hal.shadowing.case_id import case_id
from te_hal.shadowing.comparison import compare, reference_kernel
from te_hal.shadowing.cost import Cost
from te_hal.shadowing.difference import Difference, ShadowWarning
from te_hal.shadowing.place import running_layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from te_hal.dispatch import Binding
    from te_hal.shadowing.comparison import Outcome
    from te_hal.shadowing.cost import OpCount

_WHERE = "te_hal.shadow"


class Shadow(contextlib.AbstractContextManager["Shadow"]):
    """A block in which ops also run on a reference; made by :func:`shadow`.

    Attributes:
        difference: the first op that left its contract; None so far.
        cost: what was compared, and what that took.
        steps: training steps that ended so far.
    """

    def __init__(
        self,
        backend: str | None,
        reference: str,
        *,
        every: int,
        sample: float,
        seed: int,
        on_difference: str,
        folder: Path,
    ) -> None:
        self.difference: Difference | None = None
        self.cost = Cost()
        self.steps = 0
        self.backend, self.reference = backend, reference
        self._every, self._sample, self._raises, self._folder = every, sample, on_difference == "raise", folder
        self._random = random.Random(seed).random  # noqa: S311 - a sample, no secret
        self._lock = threading.Lock()
        self._entered = contextlib.ExitStack()
        self._active, self._since = False, 0.0

    def __enter__(self) -> Shadow:  # noqa: PYI034 - Self is newer than Python 3.10
        """Have what is bound from now on, in this thread, run on both sides.

        Raises:
            BackendNotFoundError, BackendUnavailableError: of backend or reference.
            StateError: entered already, or before.
        """
        if self._since:
            raise StateError(
                _WHERE, got="a second entry", accepted="one block per call", todo="call te_hal.shadow again"
            )
        with use_backend(self.reference):
            pass  # refuses one that is unknown or unusable here
        self._selection = Selection(self.reference, _WHERE, Policy(), _WHERE, counted=False)
        with contextlib.ExitStack() as stack:
            if self.backend is not None:
                stack.enter_context(use_backend(self.backend))
            stack.enter_context(use_observer(self._bind))
            self._entered = stack.pop_all()
        self._since = time.perf_counter()
        self._choose_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        self.cost.seconds_in_block = time.perf_counter() - self._since
        self._entered.close()

    def step(self) -> None:
        """Say that a training step has ended. Without it everything counts as step 1."""
        self.steps += 1
        self._choose_step()

    def report(self) -> str:
        """What was compared, what it cost, and the first difference; text of several lines."""
        if self._active:
            self.cost.seconds_in_block = time.perf_counter() - self._since
        backend = self.backend or "the backend in force"
        first = [] if self.difference is None else [f"first difference: {self.difference}"]
        return "\n".join([f"te_hal.shadow: {backend} beside {self.reference}", *self.cost.lines(), *first])

    def _choose_step(self) -> None:
        number = self.steps + 1
        self._active = number == 1 or number % self._every == 0

    def _bind(self, binding: Binding) -> Callable[..., Any]:
        """What runs in place of a kernel: the kernel, and for a sample of the calls the reference too."""
        op, kernel = binding.call.op, binding.kernel
        try:
            reference = reference_kernel(binding.call, self._selection)
        except (UnsupportedError, BackendUnavailableError) as error:
            self.cost.left_out[op] = str(error)
            return kernel
        # A kernel of a plan belongs to the module that made it, and so does what autograd runs of it later.
        bound_in = None if binding.shared else running_layer()
        count, backend = self.cost.of(op), binding.backend.name
        sample, chance = self._sample, self._random

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what the op's schema says
            count.seen += 1
            if not self._active or (sample < 1 and chance() >= sample):
                return kernel(*args, **kwargs)
            outcome = compare(op, kernel, reference, args, kwargs)
            self._note(op, backend, count, outcome, bound_in, binding.call.device.type)
            return outcome.result

        return run

    def _note(self, op: str, backend: str, count: OpCount, outcome: Outcome, bound_in: str | None, device: str) -> None:
        with self._lock:
            count.compared += 1
            self.cost.seconds += outcome.seconds
            if not outcome.findings:
                return
            count.differing += 1
            if self.difference is not None:
                return
            began = time.perf_counter()
            self.difference = found = self._describe(op, backend, outcome, bound_in, device)
            self.cost.seconds += time.perf_counter() - began
        if self._raises:
            raise found.error()
        warnings.warn(f"{found}; differences from here on are only counted", ShadowWarning, stacklevel=3)

    def _describe(self, op: str, backend: str, outcome: Outcome, bound_in: str | None, device: str) -> Difference:
        running = running_layer()
        facts: dict[str, Any] = {
            "call": call_text(op, outcome.given),
            "case": case_id(op, outcome.given),
            "step": self.steps + 1,
            "layer": running or bound_in,
            "direction": "forward" if running else "backward or outside of modules",
            "findings": outcome.findings,
        }
        about = {**facts, "findings": list(outcome.findings), "versions": versions()}
        saved = SavedCall(op, backend, self.reference, device, outcome.given, outcome.found, about)
        try:
            file, reason = write_call(self._folder, saved), ""
        except OSError as error:  # a full disk must not hide what was found
            file, reason = None, f"{self._folder}: {error.strerror}"
        return Difference(op=op, backend=backend, reference=self.reference, file=file, file_error=reason, **facts)


def shadow(
    backend: str | None = None,
    *,
    reference: str = "cpu_reference",
    every: int = 1,
    sample: float = 1.0,
    seed: int = 0,
    on_difference: Literal["report", "raise"] = "report",
    folder: Path | str = "te_hal_shadow",
) -> Shadow:
    """Train on a backend while each op also runs on a reference; the first one that leaves its contract is reported.

    The training is that of the backend, bit for bit: the reference works on copies. What an op may be off is what its
    schema says (docs/ops.md). Holds for what this thread binds in the block: plans of modules and public ops, their
    backward on other threads included. Each thread that trains enters a block of its own.

    Args:
        backend: runs the training; None: the one in force.
        reference: runs beside it, on the CPU.
        every: compare in the first step and in each multiple of this; :meth:`Shadow.step` says where steps end.
        sample: share of the op calls of such a step, chosen at random.
        seed: of the choice.
        on_difference: "report": a ShadowWarning at the first one, the training goes on, and later ones are counted;
            "raise": a ShadowError out of the op.
        folder: where the inputs of the first one are saved, for ``te-hal replay``.

    Raises:
        ArgumentError: a number out of range, another word for ``on_difference``, or one backend on both sides.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise _refused("every", every, "an integer from 1")
    if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not 0 < sample <= 1:
        raise _refused("sample", sample, "a number above 0, up to 1")
    if backend is not None and backend == reference:
        raise _refused("reference", reference, f"a backend other than {backend!r}, which it is to be held against")
    if on_difference not in ("report", "raise"):
        raise _refused("on_difference", on_difference, "'report', 'raise'")
    return Shadow(
        backend,
        reference,
        every=every,
        sample=sample,
        seed=seed,
        on_difference=on_difference,
        folder=Path(folder),
    )


def _refused(name: str, got: object, accepted: str) -> ArgumentError:
    return ArgumentError(f"{_WHERE}: {name}", got=repr(got), accepted=accepted, todo="choose another value")
