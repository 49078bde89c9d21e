"""The kit on this repository's own backends: a quick tier always, every case in the full run."""

from __future__ import annotations

import pytest

from te_hal.ffi.devices import HOST
from te_hal.ffi.native import Native
from te_hal.schema.catalog import SCHEMAS
from te_hal.testing import Status, Subject, cases, describe, run_case
from te_hal.testing.session import conformance

BACKENDS = pytest.mark.parametrize("backend", ["cpu_reference", "musa_emulator"])


def skip_without_library(backend: str) -> None:
    if backend == "musa_emulator" and not Native(backend, "host", HOST).opens():
        pytest.skip("the host's kernel library is not built")


@BACKENDS
@pytest.mark.parametrize("op", SCHEMAS)
def test_an_own_backend_passes_the_quick_tier(backend, op):
    skip_without_library(backend)
    tested = Subject(backend).prepare()
    outcomes = [run_case(tested, case) for case in cases(op, quick=True)]
    assert [(o.case, [str(f) for f in o.findings]) for o in outcomes if o.status is Status.FAILED] == []


@pytest.mark.slow
@BACKENDS
def test_an_own_backend_conforms(backend):
    skip_without_library(backend)
    session = conformance(Subject(backend), jobs=2)
    assert session.clean, describe(session)
