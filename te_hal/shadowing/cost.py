"""What a shadow has compared, op by op, and what that took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass
class OpCount:
    """Calls of one op.

    Attributes:
        seen: calls that ran.
        compared: those that ran on the reference too.
        differing: those of them that left the contract.
    """

    seen: int = 0
    compared: int = 0
    differing: int = 0


@dataclass
class Cost:
    """Counts and seconds.

    Attributes:
        ops: by op.
        left_out: ops whose calls could not be compared, with the reason.
        seconds: spent on copies, reference, judgement and files; on a device with waiting for its kernels.
        seconds_in_block: since the block was entered.
    """

    ops: dict[str, OpCount] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_in_block: float = 0.0

    def of(self, op: str) -> OpCount:
        """The count of an op, made when it is first asked for."""
        return self.ops.setdefault(op, OpCount())

    @property
    def compared(self) -> int:
        """Calls that ran on both sides."""
        return sum(count.compared for count in self.ops.values())

    @property
    def differing(self) -> int:
        """Calls that left their contract."""
        return sum(count.differing for count in self.ops.values())

    def lines(self) -> Iterator[str]:
        """The text: the total, then a line per op."""
        seen = sum(count.seen for count in self.ops.values())
        rest = self.seconds_in_block - self.seconds
        share = f", {self.seconds / rest:.1%} on top of the {rest:.3g} s without it" if rest > 0 else ""
        yield f"{self.compared:,} of {seen:,} op calls compared, {self.differing:,} outside their contracts"
        yield f"cost {self.seconds:.3g} s{share}"
        width = max(map(len, self.ops), default=0)
        for op, count in sorted(self.ops.items()):
            different = f", {count.differing:,} differ" if count.differing else ""
            yield f"  {op:<{width}}  {count.compared:,} of {count.seen:,}{different}"
        yield from _left_out(self.left_out)


def _left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    for op, reason in sorted(reasons.items()):
        yield f"  not compared: {op}: {reason}"
