"""What the failures of an op have in common: the words that every failing case has and no passing one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.testing.case import Case
from te_hal.testing.finding import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from te_hal.testing.finding import Outcome

_MULTIPLE = 16
#: One failure has everything in common with itself.
_SEVERAL = 2


def common_causes(outcomes: Iterable[Outcome]) -> list[str]:
    """Sentences about the failures of one op, none where they have nothing of their own in common."""
    failed, passed = [], []
    for outcome in outcomes:
        case = Case.of(outcome.case)
        if outcome.status is Status.FAILED:
            failed.append(case)
        elif outcome.status in (Status.PASSED, Status.COMPOSED) and all(_sizes(case)):
            # Without elements there is little to get wrong.
            passed.append(case)
    if len(failed) < _SEVERAL or not passed:
        return []
    return list(_sentences(failed, passed))


def _sentences(failed: list[Case], passed: list[Case]) -> Iterator[str]:
    for axis in failed[0].words:
        words = {case.words[axis] for case in failed}
        spared = sum(case.words[axis] in words for case in passed)
        # A single word may spare a few: a term that is too small to show, say.
        if not spared or (len(words) == 1 and spared * 10 <= len(failed)):
            said = f"it fails with {axis}={' or '.join(sorted(words))} and with nothing else"
            yield f"{said} ({spared} such cases pass)" if spared else said
    wrong, right = ([sizes for sizes in map(_sizes, cases) if all(sizes)] for cases in (failed, passed))
    for place, said in ((slice(-1, None), "the last size is"), (slice(None), "every size is")):
        off = [any(size % _MULTIPLE for size in sizes[place]) for sizes in wrong]
        if all(off) and right and not any(any(size % _MULTIPLE for size in sizes[place]) for sizes in right):
            yield f"it is right only where {said} a multiple of {_MULTIPLE}"
            return


def _sizes(case: Case) -> list[int]:
    """Empty tensors have a 0 among them."""
    return [int(size) for size in case.words["shape"].split("x") if size != "scalar"]
