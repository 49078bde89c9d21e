"""A run of the kit: which cases, their outcomes, and whether the backend may claim conformance."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_hal.ffi.native import native_of
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, TeHalError
from te_hal.testing.case import Case, cases
from te_hal.testing.finding import Status
from te_hal.testing.workers import load_apart, run_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.testing.finding import Outcome
    from te_hal.testing.subject import Subject


#: The default of --op.
_EVERY_OP = ".*"


@dataclass(frozen=True)
class Session:
    """What a run found.

    Attributes:
        subject: the backend, with the device that it was tested on.
        tier: "full", "quick", or "chosen" where ops or cases were chosen.
        outcomes: one per case.
        stale: entries of the lists that nothing bears out; asked after a full run alone.
        seconds: how long it took.
        allocates: whether the backend makes memory by a way of its own: it names an allocator or runs a kernel library.
    """

    subject: Subject
    tier: str
    outcomes: tuple[Outcome, ...]
    stale: tuple[str, ...]
    seconds: float
    allocates: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing failed and no list entry is stale."""
        return not self.stale and all(outcome.status is not Status.FAILED for outcome in self.outcomes)

    @property
    def missing(self) -> tuple[str, ...]:
        """Ops of which every case is refused: the backend does not have them."""
        return tuple(op for op in SCHEMAS if set(self.counts(op)) == {Status.UNSUPPORTED})

    def counts(self, op: str) -> Counter[Status]:
        """Cases of an op by how they ended."""
        return Counter(outcome.status for outcome in self.outcomes if outcome.op == op)


def chosen_cases(op: str, ids: Sequence[str], *, quick: bool, streams: bool) -> list[Case]:
    """The cases of every op that the regular expression matches whole, or those with these ids.

    Raises:
        ArgumentError: no op matches, an id is none, or what chooses among cases stands beside ids.
    """
    if ids and (quick or op != _EVERY_OP):
        raise ArgumentError(
            "--case",
            got=" and ".join(["--quick"] * quick + ["--op"] * (op != _EVERY_OP)) + " beside it",
            accepted="ids alone: they name every case that is run",
            todo="leave one of them out",
        )
    if ids:
        return [Case.of(text) for text in ids]
    return [case for name in chosen_ops(op) for case in cases(name, quick=quick, streams=streams)]


def chosen_ops(op: str) -> list[str]:
    """The ops that a regular expression matches whole.

    Raises:
        ArgumentError: it is none, or no op matches.
    """
    try:
        found = [name for name in SCHEMAS if re.fullmatch(op, name)]
    except re.error as error:
        raise ArgumentError(
            "--op", got=f"{op!r}: {error}", accepted="a regular expression", todo="correct it"
        ) from error
    if not found:
        raise ArgumentError("--op", got=repr(op), accepted=", ".join(SCHEMAS), todo="name at least one op")
    return found


def conformance(
    subject: Subject,
    *,
    op: str = _EVERY_OP,
    ids: Sequence[str] = (),
    quick: bool = False,
    jobs: int = 1,
    timeout: float = 60.0,
    heard: Callable[[Outcome], None] = lambda outcome: None,  # noqa: ARG005
) -> Session:
    """Run the kit on a backend.

    Args:
        subject: the backend.
        op: regular expression of the ops' names.
        ids: cases to run instead; neither ``op`` nor ``quick`` beside them.
        quick: every value of every axis once, instead of every pair of values.
        jobs: worker processes; 0: in this one.
        timeout: seconds that a case may take.
        heard: called with every outcome as it comes.

    Raises:
        TeHalError: the backend cannot be used here, ends the process or hangs while it is loaded, or nothing matches.
    """
    begun = time.monotonic()
    first = load_apart(subject, jobs) if jobs else None
    try:
        tested = subject.prepare()
        run = chosen_cases(op, ids, quick=quick, streams=tested.streams is not None)
    except TeHalError:
        if first is not None:
            first.end()
        raise
    outcomes = []
    for outcome in run_cases(subject, run, jobs=jobs, timeout=timeout, first=first):
        outcomes.append(outcome)
        heard(outcome)
    whole = not ids and op == _EVERY_OP
    tier = ("quick" if quick else "full") if whole else "chosen"
    stale = tested.lists.stale(outcomes) if tier == "full" else []
    at = replace(subject, device=str(tested.device))
    allocates = tested.backend.allocator is not None or native_of(tested.backend.name) is not None
    return Session(at, tier, tuple(outcomes), tuple(stale), time.monotonic() - begun, allocates)
