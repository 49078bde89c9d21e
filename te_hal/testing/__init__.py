"""The conformance kit: proof that a backend does what the ops' schemas and docs/numerics.md say.

A case is one call of one op, made from the op's schema and a list of hard values; its id can be pasted back::

    te-hal conformance --backend mychip                       # every case
    te-hal conformance --backend mychip --op 'quantize.*' --quick
    te-hal conformance --backend mychip --case 'amax:shape=13x37,values=nan'
    pytest --pyargs te_hal.testing --te-hal-backend mychip    # the same cases as tests

From Python::

    from te_hal.testing import Subject, conformance
    session = conformance(Subject("mychip"), op="amax")
    assert session.clean, report(session)

``docs/conformance.md`` takes a backend from its entry point to a certificate.
"""

from te_hal.testing.case import Case, cases
from te_hal.testing.certificate import certificate
from te_hal.testing.execute import Tested, run_case
from te_hal.testing.finding import Finding, Kind, Outcome, Status
from te_hal.testing.lists import Lists
from te_hal.testing.report import report
from te_hal.testing.session import Session, conformance
from te_hal.testing.subject import Subject

__all__ = [
    "Case",
    "Finding",
    "Kind",
    "Lists",
    "Outcome",
    "Session",
    "Status",
    "Subject",
    "Tested",
    "cases",
    "certificate",
    "conformance",
    "report",
    "run_case",
]
