"""Flags that a user passes: True or False, and nothing that merely counts as one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_flags(where: str, flags: Mapping[str, object]) -> None:
    """Each a bool: nothing is taken by its truth, since the text "False" is true.

    Raises:
        ArgumentError: one is not; names it behind ``where``.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{where}: {name}", got=repr(value), accepted="True, False", todo="pass a bool")
