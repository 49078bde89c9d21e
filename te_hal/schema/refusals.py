"""Arguments that are refused at anything but one value: declared once, for the refusal and for docs/te_parity.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Refusal(NamedTuple):
    """The value that an argument may have, and in a sentence why it may have no other."""

    accepted: object
    reason: str


#: Per public callable, as users write it behind ``te.``: its refused arguments. Filled where modules are imported.
REFUSED: dict[str, dict[str, Refusal]] = {}


def declare(where: str, accepted: Mapping[str, object], reasons: Mapping[str, str]) -> dict[str, Refusal]:
    """Declare arguments of a callable as refused; beside the code that refuses them.

    Args:
        where: the callable, as users write it behind ``te.``: ``"Linear"``, ``"ops.Bias"``, ``"Linear.forward"``.
        accepted: by argument, the one value that it may have.
        reasons: by argument, why; others may be among them.

    Returns:
        What :func:`refuse` takes.
    """
    declared = {name: Refusal(value, reasons[name]) for name, value in accepted.items()}
    REFUSED.setdefault(where, {}).update(declared)
    return declared


def refuse(where: str, given: Mapping[str, object], declared: Mapping[str, Refusal]) -> None:
    """Accept declared arguments at their one value only.

    Args:
        where: the callable or the module's name, for the message.
        given: arguments as passed, by name; others may be among them.
        declared: what :func:`declare` gave.

    Raises:
        UnsupportedError: one differs; names it and says why it is refused.
    """
    for name, (accepted, reason) in declared.items():
        value = given.get(name, accepted)
        alike = not isinstance(value, torch.Tensor) and isinstance(value, bool) is isinstance(accepted, bool)
        if value is accepted or (alike and value == accepted):
            continue
        raise UnsupportedError(
            f"{where}: {name}",
            got=f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
            accepted=repr(accepted),
            todo=f"leave it out: {reason}",
        )
