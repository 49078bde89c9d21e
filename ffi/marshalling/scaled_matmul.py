"""Products of FP8 operands under per-tensor scaling by torch._scaled_mm, rounded once (G1 to G4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.ffi.marshal import address, contiguous
from te_hal.ffi.marshalling.cast import copy_to_read
from te_hal.ffi.marshalling.plain_matmul import finish
from te_hal.schema.formats import ColumnwiseOrder

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.storage import QuantizedStorage

#: Of sizes, and in bytes of addresses.
_MULTIPLE = 16


class Factor(NamedTuple):
    """One operand: FP8 values ``[rows or cols, contraction]`` and their fp32 factor ``[1]``."""

    values: torch.Tensor
    scale_inv: torch.Tensor


def orient(native: Native, a: Any, b: Any, layout: str, *, needs_rows: bool) -> tuple[Factor, Factor]:  # noqa: ANN401 - storages, as the choice has made sure
    """Both operands with the contraction last.

    Args:
        native: transposes a copy where the fitting one was not made.
        a: storage ``[M, K]``, or ``[M, N]``.
        b: storage ``[N, K]``, or ``[M, K]``.
        layout: which product.
        needs_rows: the contraction must be what is contiguous; otherwise a transposed view will do.
    """
    return (
        _with_contraction_last(native, a, transposed=layout == "wgrad", needs_rows=needs_rows),
        _with_contraction_last(native, b, transposed=layout != "fprop", needs_rows=needs_rows),
    )


def _with_contraction_last(native: Native, storage: QuantizedStorage, *, transposed: bool, needs_rows: bool) -> Factor:
    """The storage as ``[rows, cols]``, or transposed; of its copies the one that lies so, if there is one."""
    turned = storage.columnwise_data if storage.columnwise_order == ColumnwiseOrder.TRANSPOSED else None
    if transposed and turned is not None and storage.columnwise_scale_inv is not None:
        return Factor(contiguous(turned).view(storage.format.dtype), storage.columnwise_scale_inv)
    data, _, scale_inv = copy_to_read(native, storage)
    lies_transposed = data is turned and storage.rowwise_data is None
    if lies_transposed != transposed:
        data = _transposed(native, data) if needs_rows else data.t()
    return Factor(data.view(storage.format.dtype), scale_inv)


def _transposed(native: Native, data: torch.Tensor) -> torch.Tensor:
    rows, cols = data.shape
    result = native.empty((cols, rows), torch.uint8, data.device)
    status = native.lib.api_transpose(
        native.library.api, address(data), address(result), rows, cols, 1, native.stream(data.device)
    )
    if status:
        native.check(status, "transpose")
    return result


def fits(operands: tuple[Factor, Factor]) -> bool:
    """Whether torch._scaled_mm takes these sizes and addresses."""
    (left, _), (right, _) = operands
    rows, contraction = left.shape
    cols = right.shape[0]
    aligned = left.data_ptr() % _MULTIPLE == 0 and right.data_ptr() % _MULTIPLE == 0
    return aligned and rows > 0 and contraction > 0 and cols > 0 and (contraction | cols) % _MULTIPLE == 0


def multiply(
    operands: tuple[Factor, Factor],
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    accumulate: bool,
) -> torch.Tensor:
    """``left @ right.T`` with both factors, plus bias, plus what ``out`` holds if asked, rounded once to ``dtype``.

    torch adds a bias of the result's own 16-bit dtype; any other one, and the accumulation, follow in fp32.
    """
    (left, left_scale_inv), (right, right_scale_inv) = operands
    fused_bias = bias.detach() if bias is not None and bias.dtype == dtype != torch.float32 else None
    addends = [] if bias is None or fused_bias is not None else [bias.detach()]
    if accumulate and out is not None:
        addends.append(out)
        if fused_bias is not None:
            addends, fused_bias = [fused_bias, out], None
    product: torch.Tensor = torch._scaled_mm(  # noqa: SLF001 - the name that every torch from 2.7 on has
        left,
        right.t(),
        scale_a=left_scale_inv.view(1),
        scale_b=right_scale_inv.view(1),
        bias=fused_bias,
        out_dtype=torch.float32 if addends else dtype,
        use_fast_accum=False,
    )
    if addends:
        return finish(product, addends, out, dtype)
    return product if out is None else out.copy_(product)
