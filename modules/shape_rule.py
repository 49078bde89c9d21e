"""The shape rule of FP8 gemms: the same on every backend, so that models stay portable."""

from __future__ import annotations

import math

from te_hal.schema.errors import ArgumentError

LEADING_MULTIPLE = 8
LAST_MULTIPLE = 16


def check_fp8_shape(
    module: str,
    role: str,
    shape: tuple[int, ...],
    names: tuple[str, str] = ("the product of the leading sizes", "the last size"),
) -> None:
    """Refuse an operand that FP8 cannot take.

    Args:
        module: module class and name, for the message.
        role: the operand: "input", "weight", ...
        shape: the operand's shape. The product of its leading sizes must divide by 8, its last size by 16.
        names: how the message calls these two.

    Raises:
        ArgumentError: names the operand, the size, the multiple, and the way out.
    """
    leading, last = math.prod(shape[:-1]), shape[-1]
    if leading % LEADING_MULTIPLE:
        wanted = -(-leading // LEADING_MULTIPLE) * LEADING_MULTIPLE
        raise _error(module, role, shape, f"{names[0]}, {leading}", LEADING_MULTIPLE, wanted)
    if last % LAST_MULTIPLE:
        wanted = -(-last // LAST_MULTIPLE) * LAST_MULTIPLE
        raise _error(module, role, shape, f"{names[1]}, {last}", LAST_MULTIPLE, wanted)


def _error(module: str, role: str, shape: tuple[int, ...], what: str, multiple: int, wanted: int) -> ArgumentError:
    return ArgumentError(
        f"{module}: {role}",
        got=f"shape {tuple(shape)} under FP8",
        accepted=f"{what}, must be divisible by {multiple}",
        todo=f"pad it to {wanted}, or run this module inside te.autocast(enabled=False)",
    )
