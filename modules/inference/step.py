"""What one step of generation adds to which sequences, as the tensors that a cache is read and written with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from te_hal.modules.inference.slots import Slots


#: Where places are worked out, whatever torch's default device is.
_HOST = torch.device("cpu")


class Step:
    """New tokens of each sequence behind those it has.

    Args:
        before: tokens of each sequence before the step, in batch order.
        new: how many each gets.
        slots: where they lie; asked here and now, since it changes with the next step.

    Attributes:
        before, new, after: lists of ints in batch order.
    """

    def __init__(self, before: Mapping[Hashable, int], new: Mapping[Hashable, int], slots: Slots) -> None:
        self.before, self.new = list(before.values()), list(new.values())
        self.after = [old + more for old, more in zip(self.before, self.new, strict=True)]
        self._blocks = [list(slots.blocks_of[sequence]) for sequence in before]
        self._size, self._roomy = slots.size, slots.roomy
        self._kept: dict[object, torch.Tensor] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the step."""
        return max(self.after, default=0)

    @property
    def of_one_length(self) -> bool:
        """Whether all sequences are as long after the step."""
        return len(set(self.after)) <= 1

    def fits(self, tensor: torch.Tensor, qkv_format: str) -> bool:
        """Whether new keys or values, of ``qkv_format``'s rank, have this step's sequences and room for its tokens."""
        if qkv_format == "thd":
            return tensor.shape[0] == sum(self.new)
        batch, length = tensor.shape[:2] if qkv_format == "bshd" else (tensor.shape[1], tensor.shape[0])
        return batch == len(self.new) and length >= max(self.new, default=0)

    def lead(self, qkv_format: str) -> str:
        """What :meth:`fits` wants of the leading sizes, for messages."""
        if qkv_format == "thd":
            return str(sum(self.new))
        sizes = (str(len(self.new)), f"at least {max(self.new, default=0)}")
        return ", ".join(sizes if qkv_format == "bshd" else sizes[::-1])

    def stretch(self) -> tuple[int, int] | None:
        """First place and distance of rows: sequence i lies unbroken from ``first + i * distance`` on.

        None where it does not, or what lies behind its end is another's.
        """
        if any(len(blocks) != 1 for blocks in self._blocks) or not (
            self._blocks and (self._roomy or self.of_one_length)
        ):
            return None
        first = [blocks[0] for blocks in self._blocks]
        distance = first[1] - first[0] if len(first) > 1 else 1
        if distance < 1 or first != list(range(first[0], first[-1] + 1, distance)):
            return None
        return first[0] * self._size, distance * self._size

    def written(self, device: torch.device) -> torch.Tensor:
        """int64 ``[sum of new]``: where new tokens go, sequence after sequence."""
        return self._kept_as("written", device, lambda: self._places(*self._new_tokens()))

    def given(self, length: int, device: torch.device) -> torch.Tensor:
        """int64 ``[sum of new]``: where new tokens are in rows ``[b * length]`` with the tokens at the front."""

        def make() -> torch.Tensor:
            owner, place = self._new_tokens()
            return owner * length + place - torch.tensor(self.before, device=_HOST)[owner]

        return self._kept_as(("given", length), device, make)

    def read(self, device: torch.device) -> torch.Tensor:
        """int64 ``[b * longest]``: where all tokens lie; any place beyond a sequence's end."""

        def make() -> torch.Tensor:
            count, longest = len(self.after), self.longest
            owner = torch.arange(count, device=_HOST).repeat_interleave(longest)
            return self._places(owner, torch.arange(longest, device=_HOST).repeat(count))

        return self._kept_as("read", device, make)

    def absent(self, device: torch.device) -> torch.Tensor | None:
        """Bool ``[b, longest]``, True beyond a sequence's end; None where all are as long."""
        if self.of_one_length:
            return None
        return torch.arange(self.longest, device=device) >= self.lengths("after", device).unsqueeze(1)

    def lengths(self, which: str, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """``[b]``: "before", "new" or "after"."""
        return self._kept_as(
            (which, dtype), device, lambda: torch.tensor(getattr(self, which), dtype=dtype, device=_HOST)
        )

    def _new_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each new token its sequence, and its place in it."""
        new = torch.tensor(self.new, dtype=torch.int64, device=_HOST)
        owner = torch.arange(len(self.new), device=_HOST).repeat_interleave(new)
        first = torch.tensor(self.before, dtype=torch.int64, device=_HOST) - (new.cumsum(0) - new)
        return owner, torch.arange(len(owner), device=_HOST) + first[owner]

    def _places(self, owner: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        width = max((len(blocks) for blocks in self._blocks), default=1)
        rows = [blocks + [0] * (max(width, 1) - len(blocks)) for blocks in self._blocks]
        table = torch.tensor(rows, dtype=torch.int64, device=_HOST).view(len(rows), max(width, 1))
        return table[owner, place // self._size] * self._size + place % self._size

    def _kept_as(self, name: object, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Made once for all layers."""
        key = (name, device)
        if key not in self._kept:
            with torch.inference_mode(mode=False):
                self._kept[key] = make().to(device)
        return self._kept[key]
