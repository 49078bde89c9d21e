"""Counts the calls of ops, by who ran them: te_hal.report reads it.

A count is a list of one number, so that counting costs a public op about 0.05 us: it is kept in the memo beside the
kernel, and added to by the op's generated entry. Kernels that plans and compositions keep are wrapped, for 0.06 us a
call. Adding needs no lock: CPython changes threads between calls and loops, and ``count[0] += 1`` has neither.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_hal.dispatch.runs import Runs
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import REQUIRED

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.dispatch.verdict import Verdict

    Count = list[int]
    Key = tuple[str, Runs, str, str]


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls of one op that one implementation ran.

    Attributes:
        op: its name.
        runs: a kernel, te_hal's composition, or a fallback's kernel.
        backend: whose kernel ran; of a composition, the backend that has none of its own.
        instead_of: of a fallback, the backend that refused; else empty.
        reason: of a composition or fallback, the first reason for it; else empty.
        calls: since the start, or the last te_hal.reset().
    """

    op: str
    runs: Runs
    backend: str
    instead_of: str
    reason: str
    calls: int


@dataclass
class _Record:
    """What happened since the start or the last reset."""

    counts: dict[Key, Count] = field(default_factory=dict)
    reasons: dict[Key, str] = field(default_factory=dict)


_RECORD = _Record()


def count_of(op: str, found: Verdict) -> Count:
    """Where calls that run as a verdict says are counted; made when it is first asked for."""
    instead_of = found.first.name if found.runs is Runs.FALLBACK else ""
    key = (op, found.runs, (found.by or found.first).name, instead_of)
    if found.runs is not Runs.KERNEL:
        _RECORD.reasons.setdefault(key, found.answer.sentence)
    return _RECORD.counts.setdefault(key, [0])


def counting(op: str, kernel: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A kernel of an op, counting its calls: a function of the op's own signature, at a third of the cost of any."""
    return functools.wraps(kernel)(_maker(op)(kernel, count))


@functools.cache
def _maker(op: str) -> Callable[[Callable[..., Any], Count], Callable[..., Any]]:
    """Gives a counting function of an op's signature for a kernel and a count."""
    signature = SCHEMAS[op].signature
    defaults = {f"default_{name}": default for name, _, default in signature if default is not REQUIRED}
    named = [name if default is REQUIRED else f"{name}=default_{name}" for name, _, default in signature]
    positional = [text for text, (_, by_keyword, _) in zip(named, signature, strict=True) if not by_keyword]
    keywords = [text for text, (_, by_keyword, _) in zip(named, signature, strict=True) if by_keyword]
    passed = ", ".join(f"{name}={name}" if by_keyword else name for name, by_keyword, _ in signature)
    source = [
        "def make(kernel, count):",
        f"    def run({', '.join([*positional, *['*'] * bool(keywords), *keywords])}):",
        "        count[0] += 1",
        f"        return kernel({passed})",
        "    return run",
    ]
    namespace: dict[str, Any] = dict(defaults)
    exec(compile("\n".join(source), f"<te_hal counting {op}>", "exec"), namespace)  # noqa: S102 - own text
    return namespace["make"]  # type: ignore[no-any-return]


def call_counts() -> list[CallCount]:
    """Every implementation that has been called, by op and in order of its first call."""
    counts = sorted(_RECORD.counts.items(), key=lambda each: each[0][0])
    return [CallCount(*key, _RECORD.reasons.get(key, ""), count[0]) for key, count in counts if count[0]]


def forget() -> None:
    """Counts back to zero. Kernels that are bound keep counting into what they have, so it stays."""
    for count in list(_RECORD.counts.values()):
        count[0] = 0
    _RECORD.reasons.clear()
