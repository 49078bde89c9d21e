"""Check: one layer of what a backend stands on, with what was found and what to do."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any


class State(str, enum.Enum):
    """How a layer is."""

    OK = "ok"
    ABSENT = "absent"  #: not here; only what needs it is affected
    WRONG = "wrong"  #: here, and cannot work as it is
    NOTE = "note"  #: worth knowing


@dataclass(frozen=True)
class Check:
    """One layer.

    Attributes:
        layer: what was looked at.
        state: how it is.
        found: what is there.
        todo: what to do about it; empty where there is nothing to do.
    """

    layer: str
    state: State
    found: str
    todo: str = ""

    def __str__(self) -> str:
        todo = f"; {self.todo}" if self.todo else ""
        return f"{self.state.value:<6}  {self.layer}: {self.found}{todo}"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "state": self.state.value}
