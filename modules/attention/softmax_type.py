"""What joins the sum under the softmax: nothing, 1, or the exponential of a learned number per head."""

from __future__ import annotations

from te_hal.schema.errors import ArgumentError

VANILLA, OFF_BY_ONE, LEARNABLE = TYPES = ("vanilla", "off-by-one", "learnable")


def check_softmax_type(where: str, given: object) -> str:
    """One of TYPES.

    Raises:
        ArgumentError: anything else.
    """
    if given in TYPES:
        return str(given)
    accepted = ", ".join(repr(name) for name in TYPES)
    raise ArgumentError(f"{where}: softmax_type", got=repr(given), accepted=accepted, todo="correct it")
