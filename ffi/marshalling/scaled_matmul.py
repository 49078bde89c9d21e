"""Products of FP8 operands under per-tensor scaling by torch._scaled_mm, rounded once (G1 to G4).

Only for bf16 results: the sums of Hopper's FP8 units are off by 1.3e-4 in fp32, at any length of the contraction, which
the rounding to bf16 hides and the schema's bounds for fp32 and fp16 do not allow. Fast accumulation loses more
(2.3e-3 in bf16 at 16384) and saves nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address
from te_hal.ffi.marshalling.cast import copy_to_read, dequantize
from te_hal.ffi.marshalling.nvfp4_cast import unscaled_operand
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.nvfp4_layout import NVFP4_MODES

if TYPE_CHECKING:
    from te_hal.ffi.marshalling.plain_matmul import Result
    from te_hal.ffi.native import Native
    from te_hal.schema.storage import QuantizedStorage

#: Results that show the error of Hopper's FP8 sums, 1.3e-4: half a unit of fp16 is 2.4e-4, of bf16 2e-3.
PRECISE_RESULTS = (torch.float32, torch.float16)
#: Of sizes, and in bytes of addresses.
_MULTIPLE = 16


class Factors(NamedTuple):
    """Both operands: FP8 values ``[rows, contraction]`` and ``[cols, contraction]``, and their fp32 factors ``[1]``."""

    left: torch.Tensor
    right: torch.Tensor
    left_scale_inv: torch.Tensor
    right_scale_inv: torch.Tensor


def orient(native: Native, a: Any, b: Any, layout: str, *, needs_rows: bool) -> Factors:  # noqa: ANN401 - storages, as the choice has made sure
    """Both operands with the contraction last.

    Args:
        native: transposes a copy where the fitting one was not made.
        a: storage ``[M, K]``, or ``[M, N]``.
        b: storage ``[N, K]``, or ``[M, K]``.
        layout: which product.
        needs_rows: the contraction must be what is contiguous; otherwise a transposed view will do.
    """
    left, left_scale_inv = _with_contraction_last(native, a, turned=layout == "wgrad", needs_rows=needs_rows)
    right, right_scale_inv = _with_contraction_last(native, b, turned=layout != "fprop", needs_rows=needs_rows)
    return Factors(left, right, left_scale_inv, right_scale_inv)


def _with_contraction_last(
    native: Native, storage: QuantizedStorage, *, turned: bool, needs_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The storage as ``[rows, cols]``, or transposed; of its copies the one that lies so, if there is one."""
    kind = storage.kind
    if turned and kind.order == ColumnwiseOrder.TRANSPOSED:
        data, scale_inv = storage.columnwise_data, storage.columnwise_scale_inv
    else:
        data, scale_inv = (None, None) if turned else (storage.rowwise_data, storage.rowwise_scale_inv)
    if data is None or scale_inv is None or not data.is_contiguous():
        data, copy, scale_inv = copy_to_read(native, storage)
        if (copy == codes.COPIES[ColumnwiseOrder.TRANSPOSED]) != turned:
            data = transposed(native, data) if needs_rows else data.t()
    return data.view(kind.format.dtype), scale_inv


def transposed(native: Native, data: torch.Tensor) -> torch.Tensor:
    """A transposed copy of contiguous bytes ``[rows, cols]``, by the library."""
    rows, cols = data.shape
    result = native.empty((cols, rows), torch.uint8, data.device)
    status = native.lib.api_transpose(
        native.library.api, address(data), address(result), rows, cols, 1, native.stream(data.device)
    )
    if status:
        native.check(status, "transpose")
    return result


def fits(factors: Factors) -> bool:
    """Whether torch._scaled_mm takes these sizes and addresses."""
    left, right = factors.left, factors.right
    rows, contraction = left.shape
    cols = right.shape[0]
    aligned = (left.data_ptr() | right.data_ptr()) % _MULTIPLE == 0
    return aligned and rows > 0 and contraction > 0 and cols > 0 and (contraction | cols) % _MULTIPLE == 0


def multiply(factors: Factors, result: Result) -> torch.Tensor:
    """``left @ right.T`` with both scales, plus bias, plus what ``out`` holds if asked, rounded once.

    torch adds a bias of the result's own 16-bit dtype; any other one, and the accumulation, follow in fp32.
    """
    left, right, left_scale_inv, right_scale_inv = factors
    bias, addends = None, result.addends()
    if len(addends) == 1 and not result.accumulate and addends[0].dtype == result.dtype != torch.float32:
        bias = addends.pop()
    dtype = torch.float32 if addends else result.dtype
    # In order: the factors, bias, a scale of the result, its dtype, fast accumulation.
    product: torch.Tensor = torch._scaled_mm(  # noqa: SLF001 - the name that every torch from 2.7 on has
        left, right.t(), left_scale_inv, right_scale_inv, bias, None, dtype, False
    )
    if addends:
        return result.finish(product, addends)
    return product if result.out is None else result.out.copy_(product)


def decode(
    native: Native, operand: torch.Tensor | QuantizedStorage, along_the_sum: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A plain operand's data; a storage's values without its scale, in bf16, which holds every one, and the scale."""
    if isinstance(operand, torch.Tensor):
        return operand.detach(), None
    if operand.mode in NVFP4_MODES:
        return unscaled_operand(native, operand, rowwise=along_the_sum == "rowwise")
    _, _, scale_inv = copy_to_read(native, operand)
    one = native.one(operand.device)
    row, _, col, _ = operand.tensors()
    unscaled = operand.with_tensors((row, row if row is None else one, col, col if col is None else one))
    return dequantize(native, unscaled, out_dtype=torch.bfloat16), scale_inv
