"""What a conversion did, as data and as text."""

from __future__ import annotations

from typing import NamedTuple


class Converted(NamedTuple):
    """A module that was replaced.

    Attributes:
        name: as ``named_modules`` has it.
        before: class of the old module.
        after: class of the new one.
    """

    name: str
    before: str
    after: str


class Left(NamedTuple):
    """A module that stays.

    Attributes:
        name: as ``named_modules`` has it.
        kind: its class.
        reason: why it was not replaced, or not as a whole.
    """

    name: str
    kind: str
    reason: str


class Conversion(NamedTuple):
    """The report of :func:`te_hal.convert`; ``print`` shows it.

    Attributes:
        converted: what was replaced, in the order of ``named_modules``.
        left: what could have been, and was not.
    """

    converted: tuple[Converted, ...]
    left: tuple[Left, ...]

    def __str__(self) -> str:
        """A line for each module."""
        lines = [f"{len(self.converted)} converted, {len(self.left)} left"]
        lines += [f"  {name}: {before} -> te_hal {after}" for name, before, after in self.converted]
        lines += [f"  {name}: {kind} stays, {reason}" for name, kind, reason in self.left]
        return "\n".join(lines)
