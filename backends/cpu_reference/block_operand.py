"""Operands with blocks that bf16 holds exactly, so that a product may take them there (docs/numerics.md, B5).

A code has at most four significant bits. Times a power of two it is a bf16 number wherever the exponent fits, and
MXFP8's factors, and those of blocks of 128 with ``power_of_2``, are powers of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.block_scale import factors
from te_hal.backends.cpu_reference.blocks import by_block
from te_hal.schema.block_scales import block_copy, rows_and_cols

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

#: Factors up to the largest leave codes (2**-16 to 57344) in bf16's range; below the least they might become
#: subnormal, which the units that multiply bf16 take as zero.
_LEAST, _LARGEST = 2.0**-109, 2.0**110
_MANTISSA = (1 << 23) - 1
_ALL_BUT_SIGN = 0x7F


def is_exact_in_bf16(storage: QuantizedStorage, *, rowwise: bool) -> bool:
    """Whether every ``code * factor`` of that copy is zero or a normal bf16 number. Reads the factors.

    A factor below the range does not matter where all codes of its block are zero, as in every MXFP8 block of zeros.
    """
    copy = block_copy(storage, rowwise=rowwise)
    grid = factors(copy.grid).contiguous()
    powers = (grid.view(torch.int32) & _MANTISSA) == 0
    if not bool(((powers & (grid <= _LARGEST)) | (grid < _LEAST)).all()):
        return False
    small = grid < _LEAST
    if not bool(small.any()):
        return True
    rows, cols = rows_and_cols(storage.shape)
    codes = copy.codes.reshape(cols, rows).t() if copy.turned else copy.codes.reshape(rows, cols)
    return not any(_has_values(view, small[place]) for view, place in by_block(codes, copy.block))


def _has_values(codes: torch.Tensor, chosen: torch.Tensor) -> bool:
    """Whether a chosen block of ``[down, rows, along, columns]`` has a code other than zero."""
    return bool((codes.permute(0, 2, 1, 3)[chosen] & _ALL_BUT_SIGN).any())
