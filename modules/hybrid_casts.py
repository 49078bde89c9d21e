"""Kernels for an operand that two quantizers cast, one part for each product that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import te_hal.ops
from te_hal.dispatch import resolve
from te_hal.quantization.hybrid_quantizer import HybridCasts
from te_hal.quantization.linear_calls import NO_COPIES, ROWWISE, cast_call, dequantize_call
from te_hal.quantization.operand_formats import READERS
from te_hal.quantization.quantizer import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.plan_key import PlanKey
    from te_hal.quantization.linear_calls import Copies, HybridCopies, LinearCopies
    from te_hal.quantization.operand_formats import HybridFormat, OperandFormat
    from te_hal.quantization.quantizer import CastKernels
    from te_hal.schema.formats import ColumnwiseOrder


def copies_read(copies: LinearCopies, layout: str, role: str) -> Copies:
    """The copies of the part that a product reads."""
    second = layout == READERS[role][1][0]
    of_parts = copies.hybrid("input_again") if second and role == "input" else None
    of_parts = of_parts or copies.hybrid(role)
    part = None if of_parts is None else of_parts.columnwise if second else of_parts.rowwise
    return NO_COPIES if part is None else part


def hybrid_casts(
    key: PlanKey, hybrid: HybridFormat, copies: HybridCopies | None, order: ColumnwiseOrder, casts: Callable[..., Any]
) -> Any:  # noqa: ANN401 - HybridCasts where CastKernels are expected
    """Bind the casts of both parts.

    Args:
        key: of the plan.
        hybrid: what the parts become.
        copies: of which copies; None of a part that nobody reads.
        order: memory order of columnwise copies.
        casts: makes CastKernels of kernels by the names of their ops.

    Raises:
        UnsupportedError: nobody has one of the casts.
    """
    if copies is None:
        return OPS

    def bind(of: OperandFormat | None, made: Copies | None) -> CastKernels:
        if of is None or made is None:
            return OPS  # type: ignore[no-any-return] # a module as a protocol
        call = cast_call(key.device, key.dtype, of.kind(made, order), delayed=of.delayed)
        kernels: CastKernels = casts(**{call.op: resolve(call).kernel})
        return kernels

    first, dequantize = copies.rowwise, te_hal.ops.dequantize
    if hybrid.chained and hybrid.rowwise is not None and copies.columnwise is not None:
        first = ROWWISE if first is None else first
        dequantize = resolve(dequantize_call(key.device, hybrid.rowwise, first, order, key.dtype)).kernel
    return HybridCasts(bind(hybrid.rowwise, first), bind(hybrid.columnwise, copies.columnwise), copies, dequantize)
