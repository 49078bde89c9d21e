"""The conformance kit: proof that a backend does what the ops' schemas and docs/numerics.md say.

A case is one call of one op, made from the op's schema and a list of hard values; its id can be pasted back::

    te-hal conformance --backend mychip                       # every case
    te-hal conformance --backend mychip --op 'quantize.*' --quick
    te-hal conformance --backend mychip --case 'amax:shape=13x37,values=nan'
    pytest --pyargs te_hal.testing --te-hal-backend mychip    # the same cases as tests

From Python::

    from te_hal.testing import Subject, conformance
    session = conformance(Subject("mychip"), op="amax")
    assert session.clean, describe(session)

``docs/conformance.md`` takes a backend from its entry point to a certificate.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_hal.testing.case import Case, cases
    from te_hal.testing.certificate import certify
    from te_hal.testing.execute import Tested, run_case
    from te_hal.testing.finding import Finding, Kind, Outcome, Status
    from te_hal.testing.lists import Lists
    from te_hal.testing.report import describe
    from te_hal.testing.session import Session, conformance
    from te_hal.testing.subject import Subject

#: Loaded when first asked for: the pytest plugin beside them is imported by every pytest of the environment.
_MODULES = {
    **dict.fromkeys(("Case", "cases"), "case"),
    "certify": "certificate",
    **dict.fromkeys(("Tested", "run_case"), "execute"),
    **dict.fromkeys(("Finding", "Kind", "Outcome", "Status"), "finding"),
    "Lists": "lists",
    "describe": "report",
    **dict.fromkeys(("Session", "conformance"), "session"),
    "Subject": "subject",
}

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
    "certify",
    "conformance",
    "describe",
    "run_case",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
