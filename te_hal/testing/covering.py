"""Which cases to try: every value of every axis at least once, or every pair of values of two axes."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Assignment = dict[str, str]
    #: Two axes with a value each, or one axis twice.
    Goal = tuple[tuple[str, str], tuple[str, str]]

#: How often a case that is not valid is changed at random before its goal is given up as impossible.
_TRIES = 40


def cover(
    axes: Mapping[str, Sequence[str]], valid: Callable[[Assignment], bool], *, pairs: bool, seed: int = 0
) -> Iterator[Assignment]:
    """Assignments of a value to every axis, few of them, the same in every process.

    The first has every axis' first value, where that is valid.

    Args:
        axes: name to values.
        valid: whether an assignment is a case at all.
        pairs: reach every pair of values of two axes that a valid assignment has; else every value of every axis.
        seed: of the choice among equals.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    open_goals = dict.fromkeys(_goals(axes, pairs=pairs))
    everyday = {axis: values[0] for axis, values in axes.items()}
    if valid(everyday):
        _reached(everyday, open_goals, pairs=pairs)
        yield everyday
    while open_goals:
        goal = next(iter(open_goals))
        found = _assignment(axes, goal, open_goals, valid, chance)
        del open_goals[goal]
        if found is not None:
            _reached(found, open_goals, pairs=pairs)
            yield found


def _goals(axes: Mapping[str, Sequence[str]], *, pairs: bool) -> Iterator[Goal]:
    if not pairs:
        for axis, values in axes.items():
            yield from (((axis, value), (axis, value)) for value in values)
        return
    for one, other in itertools.combinations(axes, 2):
        for value, second in itertools.product(axes[one], axes[other]):
            yield (one, value), (other, second)


def _reached(found: Assignment, open_goals: dict[Goal, None], *, pairs: bool) -> None:
    items = list(found.items())
    for goal in itertools.combinations(items, 2) if pairs else zip(items, items, strict=True):
        open_goals.pop(goal, None)


def _assignment(
    axes: Mapping[str, Sequence[str]],
    goal: Goal,
    open_goals: Mapping[Goal, None],
    valid: Callable[[Assignment], bool],
    chance: random.Random,
) -> Assignment | None:
    """A valid assignment that reaches the goal and, greedily, many others; None: none was found."""
    found = _base(axes, dict(goal), valid, chance)
    if found is None:
        return None
    reached: Assignment = dict(goal)
    for axis in axes:
        if axis not in reached:
            gains = [(_gain(reached, axis, value, open_goals), chance.random(), value) for value in axes[axis]]
            for _, _, value in sorted(gains, reverse=True):
                if value == found[axis] or valid({**found, axis: value}):
                    found[axis] = value
                    break
            reached[axis] = found[axis]
    return found


def _base(
    axes: Mapping[str, Sequence[str]], fixed: Assignment, valid: Callable[[Assignment], bool], chance: random.Random
) -> Assignment | None:
    """A valid assignment with these values, the others everyday ones where that will do; None: none was found."""
    usual = {axis: values[0] for axis, values in axes.items()} | fixed
    free = [axis for axis in axes if axis not in fixed]
    for attempt in range(_TRIES):
        found = dict(usual)
        # One axis after the other, then several at a time.
        changed = chance.sample(free, min(len(free), attempt // len(free))) if free else []
        changed += [free[attempt % len(free)]] if free else []
        for axis in changed if attempt else []:
            found[axis] = chance.choice(axes[axis])
        if valid(found):
            return found
        if not free:
            return None
    return None


def _gain(found: Assignment, axis: str, value: str, open_goals: Mapping[Goal, None]) -> int:
    mine = (axis, value)
    gain = (mine, mine) in open_goals
    return gain + sum(((other, mine) in open_goals) or ((mine, other) in open_goals) for other in found.items())
