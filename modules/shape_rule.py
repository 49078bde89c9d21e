"""The shape rule of FP8 gemms: the same on every backend, so that models stay portable."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES

if TYPE_CHECKING:
    from te_hal.quantization.operand_formats import Formats

LEADING_MULTIPLE = 8
LAST_MULTIPLE = 16

#: NVFP4 takes whole blocks in both directions, as MXFP8 does.
NVFP4_MULTIPLE = 16

#: MXFP8 takes whole blocks in both directions, as in Transformer Engine.
MXFP8_MULTIPLE = 32


def row_multiple(formats: Formats) -> int:
    """What the number of rows of a product's operand must be a multiple of, by what the operands become."""
    if _becomes_mxfp8(formats):
        return MXFP8_MULTIPLE
    nvfp4 = any(of is not None and of.mode in NVFP4_MODES for of in formats.operands)
    return NVFP4_MULTIPLE if nvfp4 else LEADING_MULTIPLE


def _becomes_mxfp8(formats: Formats) -> bool:
    return any(of is not None and of.mode is ScalingMode.MXFP8 for of in formats.operands)


def check_fp8_shape(
    module: str,
    role: str,
    shape: tuple[int, ...],
    formats: Formats,
    names: tuple[str, str] = ("the product of the leading sizes", "the last size"),
) -> None:
    """Refuse an operand that FP8 cannot take.

    Args:
        module: module class and name, for the message.
        role: the operand: "input", "weight", ...
        shape: the operand's shape. The product of its leading sizes must divide by 8, its last size by 16; both by 32
            where an operand of its product becomes MXFP8, both by 16 where one becomes NVFP4.
        formats: what the operands of its product become.
        names: how the message calls the two sizes.

    Raises:
        ArgumentError: names the operand, the size, the multiple, and the way out.
    """
    leading, last = math.prod(shape[:-1]), shape[-1]
    of_leading, of_last = row_multiple(formats), MXFP8_MULTIPLE if _becomes_mxfp8(formats) else LAST_MULTIPLE
    if leading % of_leading:
        raise _error(module, role, shape, f"{names[0]}, {leading}", of_leading, -(-leading // of_leading) * of_leading)
    if last % of_last:
        raise _error(module, role, shape, f"{names[1]}, {last}", of_last, -(-last // of_last) * of_last)


def _error(module: str, role: str, shape: tuple[int, ...], what: str, multiple: int, wanted: int) -> ArgumentError:
    return ArgumentError(
        f"{module}: {role}",
        got=f"shape {tuple(shape)} under FP8",
        accepted=f"{what}, must be divisible by {multiple}",
        todo=f"pad it to {wanted}, or run this module inside te.autocast(enabled=False)",
    )
