"""The draws of NV5, number by number: Philox 4x32-10 with Python's own integers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD = (1 << 32) - 1
_GROUP = 8


def words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ first, q & _WORD, (p >> 32) ^ d ^ second, p & _WORD
        first, second = (first + 0x9E3779B9) & _WORD, (second + 0xBB67AE85) & _WORD
    return a, b, c, d


@functools.lru_cache(maxsize=64)
def draws(shape: tuple[int, int], seed: int, *, rowwise: bool) -> NDArray[np.float64]:
    """Numbers between 0 and 1 for ``[lines, elements]`` of a copy."""
    lines, elements = shape
    found = np.zeros(shape)
    for line in range(lines):
        for group in range(elements // _GROUP):
            at = group * lines + line
            drawn = words((at & _WORD, at >> 32, 0 if rowwise else 1, 0), (seed & _WORD, seed >> 32))
            halves = [half for word in drawn for half in (word & 0xFFFF, word >> 16)]
            found[line, group * _GROUP : (group + 1) * _GROUP] = [(half + 0.5) / 65536 for half in halves]
    return found
