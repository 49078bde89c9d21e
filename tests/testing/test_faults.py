"""Every planted fault is caught, under its name, and a backend without one is not accused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from faulty_backends import FAULTS as OTHERS
from faulty_backends import REFERENCE, faulty, same
from keeping_backends import KEEPING

from te_hal.testing import Case, Kind, Lists, Session, Status, Subject, Tested, cases, describe, run_case

FAULTS = OTHERS | KEEPING
CPU = torch.device("cpu")
STREAM_CASE = "amax:shape=13x37,run=streams"


def session_of(backend, op: str) -> Session:
    """A full run over one op, in this process."""
    tested = Tested(backend, CPU, Lists())
    outcomes = tuple(run_case(tested, case) for case in cases(op))
    return Session(Subject(backend.name, "cpu"), "chosen", outcomes, (), 0.0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(name):
    fault = FAULTS[name]
    outcome = run_case(Tested(fault.backend(), CPU, Lists()), Case.of(f"{fault.op}:{fault.case}"))
    assert outcome.status is Status.FAILED
    assert fault.kind in [finding.kind for finding in outcome.findings]
    assert fault.says in " ".join(map(str, outcome.findings))


@pytest.mark.parametrize("name", FAULTS)
def test_the_case_of_a_fault_passes_without_it(name):
    fault = FAULTS[name]
    outcome = run_case(Tested(faulty(fault.op, same), CPU, Lists()), Case.of(f"{fault.op}:{fault.case}"))
    assert (outcome.status, outcome.findings) == (Status.PASSED, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_full_run_over_the_op_finds_the_fault_by_itself(name):
    fault = FAULTS[name]
    session = session_of(fault.backend(), fault.op)
    failed = [outcome for outcome in session.outcomes if outcome.status is Status.FAILED]
    assert fault.kind in {finding.kind for outcome in failed for finding in outcome.findings}
    text = describe(session)
    assert f"FAIL {fault.op}" in text
    assert fault.named in text


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted({fault.op for fault in FAULTS.values()}))
def test_a_backend_without_a_fault_is_not_accused(op):
    session = session_of(faulty(op, same), op)
    assert [finding for outcome in session.outcomes for finding in outcome.findings] == []


class LazyStream:
    """A device with one side stream, whose work is done when somebody waits for it; other work is done at once."""

    def __init__(self) -> None:
        self.queue = []
        self.is_side = False

    @contextlib.contextmanager
    def side(self):
        self.is_side = True
        yield
        self.is_side = False

    def enqueue(self, work) -> None:
        if self.is_side:
            self.queue.append(work)
        else:
            work()

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


def queued_on(stream: LazyStream):
    """The amax kernel, with its work on the current stream."""

    def change(right):
        def amax(input, *, out=None):
            result = torch.empty(1) if out is None else out
            stream.enqueue(lambda: result.copy_(right(input)) if out is None else right(input, out=out))
            return result

        return amax

    return change


def test_a_kernel_that_ignores_the_current_stream_is_caught():
    outcome = run_case(Tested(REFERENCE, CPU, Lists(), LazyStream()), Case.of(STREAM_CASE))
    assert [finding.kind for finding in outcome.findings] == [Kind.STREAM]


def test_a_kernel_on_the_current_stream_passes():
    stream = LazyStream()
    backend = faulty("amax", queued_on(stream))
    assert run_case(Tested(backend, CPU, Lists(), stream), Case.of(STREAM_CASE)).status is Status.PASSED


def test_a_wrong_copy_of_two_codes_a_byte_is_a_finding_like_any_other():
    """What explains wrong codes of a byte each is not asked."""
    case = Case.of("quantize:shape=128x128,values=outlier,scale=none,dtype=e2m1,mode=nvfp4,columnwise=true")
    outcome = run_case(Tested(FAULTS["columnwise from rowwise"].backend(), CPU, Lists()), case)
    assert outcome.status is Status.FAILED
    assert Kind.VALUES in [finding.kind for finding in outcome.findings]
