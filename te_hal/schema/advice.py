"""What the caller can do about an operand of the wrong kind, from the operand's own schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import FP8_DTYPES

if TYPE_CHECKING:
    from te_hal.schema.op import Operand


def instead_of_dtype(operand: Operand, dtype: torch.dtype) -> str:
    """What to do where a plain tensor of this dtype is not accepted."""
    if not operand.dtypes:
        if operand.written:
            return "pass a storage that te_hal.ops.quantize returned, or leave it out"
        return "it is plain already: use it as it is, or quantize it first with te_hal.ops.quantize"
    if operand.dtypes == (torch.bool,):
        return f"convert it with .bool(): {operand.doc}"
    if operand.written:
        return f"allocate it as {_one_of(operand)}"
    if operand.formats and dtype in FP8_DTYPES:
        return "wrap its bytes and their scale_inv in a QuantizedStorage"
    cast = f"cast it to {_one_of(operand)}"
    return f"{cast}, which te_hal.ops.quantize takes too" if operand.formats else cast


def instead_of_storage(operand: Operand) -> str:
    """What to do where quantized data is not accepted, or not in its format."""
    if operand.formats:
        return "quantize the values anew, into an accepted format"
    if operand.written or len(operand.dtypes) == 1:
        return f"pass a plain tensor, {_one_of(operand)}"
    return "dequantize it with te_hal.ops.dequantize"


def _one_of(operand: Operand) -> str:
    return " or ".join(str(dtype) for dtype in operand.dtypes)
