"""What may be wrong with a backend, by kind, and the outcome of a case."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Kind(str, enum.Enum):
    """Kinds of findings; their values stand in reports and in ``xfail.toml``."""

    VALUES = "wrong values"
    NONFINITE = "NaN or infinity in the wrong place"
    RESULT = "wrong shape, dtype or device"
    OUTSIDE = "wrote outside its memory"
    CHANGED = "changed an operand that it may only read"
    UNSTEADY = "not the same bits when repeated"
    SHARED = "a result in memory of another call"
    STORED = "a result of other contents"
    THREADS = "wrong when two threads call it"
    STREAM = "stream ignored"
    LATE = "error of an earlier call"
    LIE = "refused at run time what it said it supports"
    UNLISTED = "refused, and not listed in unsupported.toml"
    SUPPORTS = "supports() raised"
    ERROR = "raised an error"
    CRASH = "ended the process"
    HANG = "did not return in time"
    STALE = "stale entry"


class Status(str, enum.Enum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    COMPOSED = "composed"  #: no kernel of its own for an optional op: te_hal's composition runs
    UNSUPPORTED = "unsupported"  #: refused, and listed with a reason
    EXPECTED = "expected failure"  #: failed, and listed in xfail.toml
    SKIPPED = "skipped"  #: this machine lacks the memory


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: which.
        sentence: what was found, and what was expected.
    """

    kind: Kind
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.sentence}"


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        case: its id.
        op: name of its op.
        status: how it ended.
        findings: what is wrong.
        reason: of a status that is neither passed nor failed.
        error: the result's distance from what is due, as a share of what the contract allows; None where bytes count.
        watched: whether every result lay in memory with sentinels around it.
        returned: whether the first call gave results.
        listed: positions in unsupported.toml or xfail.toml of the entries that hold for the case.
    """

    case: str
    op: str
    status: Status
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    error: float | None = None
    watched: bool = False
    returned: bool = False
    listed: tuple[str, ...] = field(default=())
