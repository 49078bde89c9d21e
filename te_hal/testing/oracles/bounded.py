"""The float64 oracles by op, and what one of them gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Oracle = Callable[[dict[str, Any]], dict[str, "Due"]]


class Due(NamedTuple):
    """A result in float64.

    Attributes:
        value: exact but for float64's own rounding; infinite and NaN where the op's formula is.
        magnitude: per element, how large the terms were that it was made of; errors of fp32 are relative to it.
    """

    value: torch.Tensor
    magnitude: torch.Tensor


#: By op; filled by the modules beside this one.
BOUNDED: dict[str, Oracle] = {}


def oracle(*ops: str) -> Callable[[Oracle], Oracle]:
    """Decorator: the function is the oracle of these ops, from their arguments by name to results by name."""

    def register(function: Oracle) -> Oracle:
        for op in ops:
            BOUNDED[op] = function
        return function

    return register
