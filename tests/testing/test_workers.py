"""A case that crashes or hangs is named, and the cases behind it run."""

from __future__ import annotations

import re

import pytest

from te_hal.schema.errors import ArgumentError, BackendNotFoundError
from te_hal.testing import Case, Kind, Status, Subject
from te_hal.testing.workers import run_cases

CASES = [Case.of(text) for text in ("amax:shape=1", "amax:shape=129", "amax:shape=13x37", "amax:shape=0x16")]


def test_a_crash_and_a_hang_are_named_and_the_rest_runs():
    subject = Subject("faulty", factory="crashing_backend:create_backend")
    outcomes = {outcome.case: outcome for outcome in run_cases(subject, CASES, jobs=1, timeout=2.0)}
    assert set(outcomes) == {case.id for case in CASES}
    crashed, hung = outcomes["amax:shape=1"].findings, outcomes["amax:shape=129"].findings
    assert [finding.kind for finding in crashed] == [Kind.CRASH]
    assert "SIGSEGV" in crashed[0].sentence
    assert [finding.kind for finding in hung] == [Kind.HANG]
    assert outcomes["amax:shape=13x37"].status is Status.PASSED
    assert outcomes["amax:shape=0x16"].status is Status.PASSED


def test_a_backend_that_is_not_there_ends_the_run_at_once():
    with pytest.raises(BackendNotFoundError):
        list(run_cases(Subject("nosuch"), CASES))


def test_a_factory_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match="module:function"):
        Subject("mine", factory="crashing_backend:nothing").prepare()


def test_one_process_alone_has_the_operands_that_lie_far_apart():
    """Of a device's memory they may take a third; several processes at once would run out of it."""
    far = [f"amax:shape={shape},memory=far" for shape in ("13x37", "3x5x7", "16x64")]
    cases = [Case.of(text) for text in ("amax:shape=13x37", *far, "amax:shape=3x5x7", "amax:shape=16x64")]
    subject = Subject("faulty", factory="crashing_backend:create_backend")
    outcomes = {outcome.case: outcome for outcome in run_cases(subject, cases, jobs=2)}
    assert set(outcomes) == {case.id for case in cases}
    said = [finding.sentence for text in far for finding in outcomes[Case.of(text).id].findings]
    assert len(said) >= len(far)
    assert len({re.search(r"in process \d+", sentence)[0] for sentence in said}) == 1
