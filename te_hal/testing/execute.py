"""Runs one case on one backend and says what came of it."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from te_hal import ops
from te_hal.dispatch import ask_declared, support_for, use_backend
from te_hal.schema.errors import StateError
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import Code
from te_hal.schema.validate import describe_call
from te_hal.testing.allocation import WatchedAllocation, through_torch
from te_hal.testing.contents import operand_tensors, own_tensors
from te_hal.testing.diagnosis import diagnose
from te_hal.testing.expectation import expected, misfit, named
from te_hal.testing.finding import Finding, Kind, Outcome, Status
from te_hal.testing.judge import judge, result_findings
from te_hal.testing.parts import Part, compared, kept_of
from te_hal.testing.placement import Placed, has_room, place
from te_hal.testing.repetition import First, repeated
from te_hal.testing.streams import streams_of, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from te_hal.schema.backend import Backend
    from te_hal.schema.op import OpSchema
    from te_hal.schema.support import Support
    from te_hal.testing.case import Case
    from te_hal.testing.lists import Lists
    from te_hal.testing.streams import Streams

    #: From every argument by name to the result.
    Kernel = Callable[[dict[str, Any]], Any]

#: Bytes that new memory holds in the first and in the second call: NaN in every float format, and a number.
_POISONS = (0xFF, 0x5B)
_THREADS, _CALLS = 2, 3
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Tested:
    """What is tested.

    Attributes:
        backend: the backend.
        device: where its tensors lie.
        lists: its unsupported.toml and xfail.toml.
        streams: the device's; None: it has none.
    """

    backend: Backend
    device: torch.device
    lists: Lists
    streams: Streams | None = None

    __test__ = False  # pytest takes a class for tests by its name

    @staticmethod
    def of(backend: Backend, device: torch.device, lists: Lists) -> Tested:
        """With the streams that torch knows of the device."""
        return Tested(backend, device, lists, streams_of(device))


def run_case(tested: Tested, case: Case) -> Outcome:
    """Ask whether the backend supports the case, call its kernel if so, and judge what it did."""
    given = case.arguments()
    if case.words["memory"] == "far" and not has_room(tested.device, given):
        return Outcome(case.id, case.op, Status.SKIPPED, reason="not enough memory for operands that lie far apart")
    placed = place(case.schema, given, case.words["memory"], tested.device)
    try:
        answer = ask_declared(tested.backend, describe_call(case.schema, placed.arguments))
    except StateError as error:
        return _ended(tested, case, [Finding(Kind.SUPPORTS, str(error))])
    if answer:
        return _run(tested, case, placed, functools.partial(invoke, tested.backend, case.schema))
    if answer.code is Code.NO_KERNEL and case.op not in tested.backend.kernels and case.schema.optional:
        return _composed(tested, case, placed, answer)
    return _refused(tested, case, answer)


def _composed(tested: Tested, case: Case, placed: Placed, answer: Support) -> Outcome:
    """The outcome of te_hal's composition over the backend's kernels, where these can run it."""
    with use_backend(tested.backend.name):
        parts_run = support_for(describe_call(case.schema, placed.arguments))
    if not parts_run:
        return Outcome(case.id, case.op, Status.COMPOSED, reason=f"{answer.sentence}; its parts: {parts_run.sentence}")
    outcome = _run(tested, case, placed, functools.partial(_invoke_op, tested.backend.name, case.schema))
    if outcome.status is Status.PASSED:
        return replace(outcome, status=Status.COMPOSED, reason=answer.sentence)
    return outcome


def _refused(tested: Tested, case: Case, answer: Support) -> Outcome:
    entries = tested.lists.unsupported(case)
    if not entries:
        sentence = f"{answer.sentence}; list the case with a reason, or support it"
        return _ended(tested, case, [Finding(Kind.UNLISTED, sentence)])
    reason = f"{entries[0].reason} ({answer.sentence})"
    return Outcome(case.id, case.op, Status.UNSUPPORTED, reason=reason, listed=tuple(e.name for e in entries))


def _ended(
    tested: Tested, case: Case, findings: list[Finding], error: float | None = None, *, watched: bool | None = None
) -> Outcome:
    """The outcome; ``watched`` is None where the first call gave no results."""
    entries = tested.lists.expected_failures(case)
    if findings and entries:
        status, reason = Status.EXPECTED, entries[0].reason
    else:
        status, reason = (Status.FAILED if findings else Status.PASSED), ""
    names = tuple(entry.name for entry in entries)
    returned = watched is not None
    return Outcome(case.id, case.op, status, tuple(findings), reason, error, bool(watched), returned, names)


def _run(tested: Tested, case: Case, placed: Placed, kernel: Kernel) -> Outcome:
    first, watch, findings = _call(tested, case.schema, kernel, placed, _POISONS[0])
    if first is None or watch is None:
        return _ended(tested, case, findings)
    due = expected(case)
    found = named(case.schema, first, placed.arguments)
    findings += result_findings(case.schema, found, placed.arguments)
    both = all(isinstance(placed.arguments.get(name), QuantizedStorage) for name in "ab")
    error = None
    if not findings or all(f.kind is not Kind.RESULT for f in findings):
        made, error = judge(case.words["values"], case.schema, found, due, fp8=both)
        findings += diagnose(case, found, made)
    kept = kept_of(found)
    watched = bool(kept) and all(watch.holds(t) for ts in own_tensors(found, placed).values() for t in ts)
    again = place(case.schema, case.arguments(), case.words["memory"], tested.device)
    call = functools.partial(_call, tested, case.schema, kernel, poison=_POISONS[1])
    findings += repeated(case.schema, call, First(found, placed, kept), again, findings)
    if case.words["run"] == "threads" and not findings:
        findings += _in_threads(tested, case, kernel, kept)
    if case.words["run"] == "streams" and tested.streams is not None and not findings:
        findings += _on_a_stream(tested, tested.streams, case, kernel, kept)
    return _ended(tested, case, findings, error, watched=watched)


def _call(
    tested: Tested, schema: OpSchema, kernel: Kernel, placed: Placed, poison: int
) -> tuple[Any, WatchedAllocation | None, list[Finding]]:
    """The kernel's result, () where the op has none; None and what came instead where that is no such thing."""
    watch = WatchedAllocation(poison)
    try:
        with watch, through_torch(tested.backend.allocator):
            result = kernel(placed.arguments)
    except NotImplementedError as error:
        return None, None, [Finding(Kind.LIE, f"{type(error).__name__}: {error}")]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's kernel, which can fail in any way
        return None, None, [Finding(Kind.ERROR, f"{type(error).__name__}: {error}")]
    try:
        wait_for(tested.device)
    except RuntimeError as error:
        return None, None, [Finding(Kind.LATE, f"the call returned; waiting for the device gave {error}")]
    findings = [
        Finding(Kind.CHANGED if "only read" in sentence else Kind.OUTSIDE, sentence)
        for sentence in (*placed.damage(), *watch.damage())
    ]
    problem = misfit(schema, result)
    if problem:
        return None, None, [Finding(Kind.RESULT, problem)]
    return ((None,) * len(schema.outputs) if result is None else result), watch, findings


def invoke(backend: Backend, schema: OpSchema, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - as the op has it
    """Call a backend's kernel with arguments by name, positional ones in the schema's order."""
    positional, keywords = schema.split(arguments)
    return backend.kernels[schema.name](*positional, **keywords)


def attempt(tested: Tested, schema: OpSchema, arguments: dict[str, Any]) -> tuple[Any, str]:
    """A kernel's result once the device is through; and why it cannot be read, or that there is none, else empty."""
    try:
        result = invoke(tested.backend, schema, arguments)
        wait_for(tested.device)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's kernel, which can fail in any way
        return None, f"{type(error).__name__}: {error}"
    return result, misfit(schema, result)


def _invoke_op(backend: str, schema: OpSchema, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
    """Call the public op with a backend in force."""
    positional, keywords = schema.split(arguments)
    with use_backend(backend):
        return getattr(ops, schema.name)(*positional, **keywords)


def _in_threads(tested: Tested, case: Case, kernel: Kernel, kept: list[Part]) -> list[Finding]:
    """The same call from two threads at once, each on operands of its own."""
    findings: list[Finding] = []
    barrier = threading.Barrier(_THREADS)

    def work() -> None:
        try:
            barrier.wait(_TIMEOUT)
            for _ in range(_CALLS):
                placed = place(case.schema, case.arguments(), case.words["memory"], tested.device)
                result = kernel(placed.arguments)
                wait_for(tested.device)
                found = named(case.schema, () if result is None else result, placed.arguments)
                findings.extend(compared(kept, kept_of(found), Kind.THREADS))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's kernel
            findings.append(Finding(Kind.THREADS, f"{type(error).__name__}: {error}"))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT)
    return list(dict.fromkeys(findings))


def _on_a_stream(tested: Tested, streams: Streams, case: Case, kernel: Kernel, kept: list[Part]) -> list[Finding]:
    """A call on a stream that has yet to write the operands: whoever works elsewhere reads what was there before."""
    real = place(case.schema, case.arguments(), case.words["memory"], tested.device)
    placed = place(case.schema, case.arguments(), case.words["memory"], tested.device)
    pairs = list(zip(operand_tensors(placed), operand_tensors(real), strict=True))
    for target, _ in pairs:
        target.zero_()
    with streams.side():
        for target, source in pairs:
            streams.enqueue(lambda t=target, s=source: t.copy_(s))  # type: ignore[misc]
        result = kernel(placed.arguments)
        streams.synchronize()
    found = named(case.schema, () if result is None else result, placed.arguments)
    wrong = compared(kept, kept_of(found), Kind.STREAM)
    return [
        Finding(Kind.STREAM, f"{f.sentence.split(' differs')[0]} was not made in the order of the current stream")
        for f in wrong
    ]
