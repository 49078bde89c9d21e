"""Where the tokens of each sequence lie in a cache: in a row of its own, or in pages taken as it grows.

Both are blocks of as many tokens: token n of a sequence lies in its block ``n // size``, at ``n % size``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


class Slots(Protocol):
    """A layout of a cache.

    Attributes:
        size: tokens of a block.
        tokens: how many the cache holds in all.
        roomy: what lies behind a sequence's end, up to the longest length, is its own and 0.
        blocks_of: the blocks of each sequence, in order.
    """

    size: int
    tokens: int
    roomy: bool
    blocks_of: dict[Hashable, list[int]]

    def check(self, lengths: Mapping[Hashable, int]) -> None:
        """Refuse lengths, of all sequences that will be there, for which there is no room; changes nothing."""
        ...

    def take(self, lengths: Mapping[Hashable, int]) -> list[int]:
        """Give up the blocks of other sequences, and take those that these need; returns the newly taken ones."""
        ...


class Blocks:
    """A number of blocks, the lowest free ones taken first."""

    roomy = False

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.tokens = count * size
        self.blocks_of: dict[Hashable, list[int]] = {}
        self._free = list(range(count))

    def needed(self, length: int) -> int:
        """Blocks for a sequence of a length."""
        return -(-length // self.size)

    def take(self, lengths: Mapping[Hashable, int]) -> list[int]:
        """As Slots.take."""
        for sequence in [known for known in self.blocks_of if known not in lengths]:
            self._free += self.blocks_of.pop(sequence)
        self._free.sort(reverse=True)
        taken = []
        for sequence, length in lengths.items():
            blocks = self.blocks_of.setdefault(sequence, [])
            while len(blocks) < self.needed(length):
                blocks.append(self._free.pop())
                taken.append(blocks[-1])
        return taken


class Rows(Blocks):
    """A row of ``size`` tokens for each of up to ``count`` sequences, taken whole."""

    roomy = True

    def needed(self, length: int) -> int:  # noqa: ARG002 - of any length
        """One."""
        return 1

    def check(self, lengths: Mapping[Hashable, int]) -> None:
        """Nothing to refuse: InferenceParams checks the number of sequences and the length of each."""


class Pages(Blocks):
    """Pages of ``size`` tokens, taken as sequences grow."""

    def check(self, lengths: Mapping[Hashable, int]) -> None:
        """As Slots.check.

        Raises:
            StateError: more pages than there are.
        """
        needed = sum(map(self.needed, lengths.values()))
        if needed > self.count:
            raise StateError(
                "InferenceParams.pre_step",
                got=f"{needed} pages for {len(lengths)} sequences of {sum(lengths.values())} tokens in all",
                accepted=f"at most total_num_pages={self.count} of page_size={self.size}",
                todo="leave sequences out of this step, which evicts them, or make the cache larger",
            )
