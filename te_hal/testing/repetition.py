"""A call repeated, with other values and with the same: what a backend keeps from one call to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from te_hal.testing.contents import OtherContents, own_tensors, shared_memory
from te_hal.testing.expectation import named
from te_hal.testing.finding import Finding, Kind
from te_hal.testing.parts import Part, compared, kept_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from te_hal.schema.op import OpSchema
    from te_hal.testing.placement import Placed

    #: From operands to the result (None: there is none), something else, and what came instead.
    Call = Callable[[Placed], tuple[Any, object, list[Finding]]]


class First(NamedTuple):
    """A call that returned: its results, its operands, and copies of what it gave."""

    found: dict[str, Any]
    placed: Placed
    kept: list[Part]


def repeated(schema: OpSchema, call: Call, first: First, again: Placed, known: list[Finding]) -> list[Finding]:
    """What two more calls show: one with other values, which may not touch the first's results, and the first again.

    The last has its operands where those of the one before were, so that whatever was kept by address shows.

    Args:
        schema: the op.
        call: calls the kernel.
        first: the first call, whose results are held until both are done.
        again: the same operands in other memory.
        known: what the first call has shown, not to be said twice.
    """
    others = OtherContents(again, frozenset(o.name for o in schema.operands if o.written))
    other, _, trouble = call(replace(again, guards=[]))
    findings = [f for f in trouble if f.kind is Kind.OUTSIDE and f not in known]
    made = None if other is None else named(schema, other, again.arguments)
    before = [] if made is None else kept_of(made)
    if made is not None:
        findings += _overwritten(first, own_tensors(made, again))
    elif _is_late(trouble):
        return [*findings, _late(trouble)]
    others.restore()
    second, _, trouble = call(again)
    if second is None:
        return [*findings, _late(trouble)] if _is_late(trouble) else findings
    last = named(schema, second, again.arguments)
    findings += shared_memory(own_tensors(made or {}, again), own_tensors(last, again)) if not findings else []
    unsteady = compared(first.kept, kept_of(last), Kind.UNSTEADY)
    if unsteady and before and not compared(before, kept_of(last), Kind.UNSTEADY):
        sentence = "the result is the one for what the same operands held before: it is kept by their address"
        unsteady = [Finding(Kind.STORED, sentence)]
    return findings + unsteady + [f for f in trouble if f not in known]


def _overwritten(first: First, later: dict[str, list[torch.Tensor]]) -> list[Finding]:
    """Whether a later call has changed the results of the first, or lies where they are."""
    own = own_tensors(first.found, first.placed)
    shared = shared_memory(own, later)
    if shared:
        return shared
    now = kept_of(first.found)
    changed = [f for f in compared(first.kept, now, Kind.SHARED) if f.sentence.split(" ")[0].split(".")[0] in own]
    return [Finding(f.kind, f"{f.sentence.split(' differs')[0]} was changed by a later call") for f in changed]


def _is_late(trouble: list[Finding]) -> bool:
    return any(finding.kind in (Kind.ERROR, Kind.LIE, Kind.RESULT) for finding in trouble)


def _late(trouble: list[Finding]) -> Finding:
    sentence = f"the first call returned, a later one on the same kinds of operands failed: {trouble[0].sentence}"
    return Finding(Kind.LATE, sentence)
