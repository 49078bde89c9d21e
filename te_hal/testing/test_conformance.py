"""The kit as tests, collected by ``pytest --pyargs te_hal.testing --te-hal-backend NAME`` (te_hal.testing.plugin)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from te_hal.testing.execute import Tested, run_case
from te_hal.testing.finding import Status
from te_hal.testing.plugin import subject_of
from te_hal.testing.session import chosen_cases

if TYPE_CHECKING:
    from te_hal.testing.case import Case
    from te_hal.testing.subject import Subject


@functools.cache
def _tested(subject: Subject) -> Tested:
    return subject.prepare()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test per case, under its id; one that is skipped where no backend is named."""
    config = metafunc.config
    subject = subject_of(config)
    if subject is None:
        no_backend = pytest.param(None, None, marks=pytest.mark.skip(reason="--te-hal-backend names no backend"))
        metafunc.parametrize(("subject", "case"), [no_backend], ids=["no backend"])
        return
    streams = _tested(subject).streams is not None
    cases = chosen_cases(config.getoption("--te-hal-op"), (), quick=config.getoption("--te-hal-quick"), streams=streams)
    metafunc.parametrize(("subject", "case"), [(subject, case) for case in cases], ids=[case.id for case in cases])


def test_the_backend_conforms(subject: Subject, case: Case) -> None:
    """The case passes, or is admitted to with a reason."""
    outcome = run_case(_tested(subject), case)
    if outcome.status is Status.FAILED:
        pytest.fail("\n".join(map(str, outcome.findings)), pytrace=False)
    if outcome.status is Status.EXPECTED:
        pytest.xfail(outcome.reason)
    if outcome.status is not Status.PASSED:
        pytest.skip(f"{outcome.status.value}: {outcome.reason}")
