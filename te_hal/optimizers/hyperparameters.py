"""Checks of what an optimizer is given: numbers in their range, flags, dtypes, and what is refused by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch


def check_number(where: str, value: object, below: float = math.inf) -> None:
    """A finite number of at least 0, below a limit where one is given.

    Raises:
        ArgumentError: anything else; a bool is no number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 <= value < below:  # type: ignore[operator] # a number
        span = "of at least 0" if below == math.inf else f"from 0 to below {below}"
        raise ArgumentError(where, got=repr(value), accepted=f"a number {span}", todo="correct it")


def check_dtype(where: str, dtype: object, accepted: Collection[torch.dtype]) -> None:
    """One of several dtypes.

    Raises:
        ArgumentError: another one.
    """
    if dtype not in accepted:
        raise ArgumentError(where, got=repr(dtype), accepted=", ".join(map(str, accepted)), todo="choose one of these")


def refuse_settings(where: str, group: Mapping[str, Any], accepted: Mapping[str, object]) -> None:
    """Refuse what a group says of settings that this optimizer has in one way only.

    Raises:
        ArgumentError: naming the first that says otherwise; a setting that is not there says nothing.
    """
    for name, value in accepted.items():
        if group.get(name, value) != value:
            raise ArgumentError(
                f"{where}: {name}", got=repr(group[name]), accepted=repr(value), todo="leave it out of the group"
            )
