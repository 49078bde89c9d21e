"""Random numbers that follow from a key and a counter alone: Philox 4x32-10 (Salmon et al., 2011)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(low: torch.Tensor, high: torch.Tensor, upper: tuple[int, int], key: int) -> Words:
    """Four random words of 32 bits per counter.

    Args:
        low: int64, the first words of the counters.
        high: int64, their second words, of the same shape.
        upper: the other two words, the same in all counters.
        key: 64 bits, the low half first.

    Returns:
        int64 tensors of that shape, each element from 0 to 2**32 - 1.
    """
    words = (low, high, torch.full_like(low, upper[0]), torch.full_like(low, upper[1]))
    keys = key & _LOW, key >> 32
    for _ in range(_ROUNDS):
        # A product of 64 bits wraps round in int64, which keeps its bits; the shift's copies of the sign are cut off.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = (
            second.bitwise_right_shift(32).bitwise_and_(_LOW).bitwise_xor_(words[1]).bitwise_xor_(keys[0]),
            second.bitwise_and_(_LOW),
            first.bitwise_right_shift(32).bitwise_and_(_LOW).bitwise_xor_(words[3]).bitwise_xor_(keys[1]),
            first.bitwise_and_(_LOW),
        )
        keys = (keys[0] + _STEPS[0]) & _LOW, (keys[1] + _STEPS[1]) & _LOW
    return words
