"""Observing what is bound: every kernel that a selection hands out passes through its observer first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_hal.schema.backend import Backend
    from te_hal.schema.support import Call


@dataclass(frozen=True, slots=True)
class Binding:
    """A kernel that was found for a call, before anybody has it.

    Attributes:
        call: what it runs.
        backend: whose kernel it is; where the op is composed, the one that the choice fell on.
        kernel: takes the arguments of the op's schema.
        shared: it is kept in a memo, so calls from anywhere get it; else it belongs to who asked, such as a plan.
        part: a composition runs it.
    """

    call: Call
    backend: Backend
    kernel: Callable[..., Any]
    shared: bool
    part: bool


#: Gives what is bound instead: the kernel itself, or a function of the same signature. Launches nothing.
Observer = Callable[[Binding], Callable[..., Any]]
