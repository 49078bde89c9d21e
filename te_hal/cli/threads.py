"""How many threads torch computes with during a comparison."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: From here on a layer's gemms are worth more than the wait of threads for each other after every operation. Below, one
#: thread that gets no core holds up all: 2.8 s a step with two threads on two busy cores, 0.1 s with one.
WORTH_SHARING = 512
#: More than any machine has; torch takes an int32 and makes as many.
MOST_THREADS = 1024


@contextmanager
def torch_threads(asked: int | None, width: int) -> Iterator[None]:
    """Have torch compute with so many threads; afterwards with as many as before.

    Args:
        asked: how many; None for one below a width of WORTH_SHARING, else as torch has it.
        width: features of the model's hidden layers.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(asked or (1 if width < WORTH_SHARING else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
