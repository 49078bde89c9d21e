"""A session in words: a line per op, and what is wrong, with ids that can be pasted back."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from te_hal.schema.catalog import SCHEMAS
from te_hal.testing.causes import common_causes
from te_hal.testing.finding import Status

if TYPE_CHECKING:
    from te_hal.testing.finding import Kind, Outcome
    from te_hal.testing.session import Session

#: Cases shown of each kind of finding.
_SHOWN = 3


def describe(session: Session) -> str:
    """Lines for a terminal."""
    lines = [_op_line(session, op) for op in SCHEMAS if session.counts(op)]
    for op in SCHEMAS:
        mine = [outcome for outcome in session.outcomes if outcome.op == op]
        lines += _failures(op, [o for o in mine if o.status is Status.FAILED])
        lines += [f"  {op}: {sentence}" for sentence in common_causes(mine)]
    lines += [f"stale entry: {sentence}" for sentence in session.stale]
    total = len(session.outcomes)
    failed = sum(outcome.status is Status.FAILED for outcome in session.outcomes)
    verdict = "conforms" if session.clean else "does NOT conform"
    if session.missing:
        lines.append(f"missing: {', '.join(session.missing)}")
        verdict += f" in what it has, which lacks {_ops(len(session.missing))}" if session.clean else ""
    if session.clean and any(outcome.status is Status.EXPECTED for outcome in session.outcomes):
        verdict += " but for known failures"
    unwatched = _unwatched(session)
    lines += [unwatched] if unwatched else []
    lines.append(
        f"backend {session.subject.backend} {verdict}: {total} cases ({session.tier}), {failed} failed, "
        f"{len(session.stale)} stale entries, {session.seconds:.0f} s"
    )
    return "\n".join(lines)


def _ops(count: int) -> str:
    return f"{count} op{'s' if count > 1 else ''}"


def _op_line(session: Session, op: str) -> str:
    counts = session.counts(op)
    said = ", ".join(f"{count} {status.value}" for status, count in sorted(counts.items()))
    errors = [o.error for o in session.outcomes if o.op == op and o.error is not None]
    worst = f"; worst error {max(errors):.0%} of its bound" if errors else ""
    word = "FAIL" if counts[Status.FAILED] else "none" if op in session.missing else "ok"
    return f"{word:<4} {op}: {said}{worst}"


def _failures(op: str, failed: list[Outcome]) -> list[str]:
    by_kind: dict[Kind, list[tuple[str, str]]] = defaultdict(list)
    for outcome in failed:
        for finding in outcome.findings:
            by_kind[finding.kind].append((outcome.case, finding.sentence))
    lines = []
    for kind, found in by_kind.items():
        lines.append(f"{op}: {kind.value} ({len({case for case, _ in found})} cases)")
        lines += [f"  {sentence}\n    --case '{case}'" for case, sentence in found[:_SHOWN]]
    return lines


def _unwatched(session: Session) -> str:
    """What the kit could not watch, of a backend whose kernels are not torch's own functions."""
    if not session.allocates:
        return ""
    ran = [o for o in session.outcomes if o.returned and o.status is not Status.COMPOSED]
    unseen = sum(not outcome.watched for outcome in ran)
    if not unseen or unseen < len(ran) // 2:
        return ""
    return (
        f"{unseen} of {len(ran)} cases wrote results into memory that the kit did not make (the backend allocates past "
        "torch's public functions): there, writes past the end are seen in operands alone"
    )
