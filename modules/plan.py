"""LinearPlan: what forward and backward of a linear layer run, decided once per recipe, dtypes and device.

Capability is asked and kernels are bound when the plan is made; running it asks nobody. A plan belongs to the
selection it was made under: ``memo`` is dispatch's memo at that time, and a module drops plans whose memo is not
the current one.

Bound kernels skip what te_hal.ops checks. In its place: the layer checks shapes, dtypes and devices of input and
parameters before it asks for a plan, te_hal.modules.main_grad those of main_grad, and autograd those of grad_output;
the rules between a gemm's arguments hold for every call described here; quantizers check their factors when made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import te_hal.ops
from te_hal.dispatch import backend_for, current_memo, current_selection, resolve
from te_hal.modules.hybrid_casts import copies_read, hybrid_casts
from te_hal.quantization.linear_calls import (
    NO_COPIES,
    ROWWISE,
    LinearCopies,
    cast_call,
    dequantize_call,
    fused_call,
    gemm_call,
    linear_copies,
    operand_kind,
)
from te_hal.quantization.quantizer import OPS
from te_hal.schema.support import Call

if TYPE_CHECKING:
    import torch

    from te_hal.dispatch import Selection
    from te_hal.modules.plan_key import PlanKey
    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.quantizer import CastKernels
    from te_hal.schema.formats import ColumnwiseOrder
    from te_hal.schema.support import Kind

Kernel = Callable[..., Any]


class Casts(NamedTuple):
    """The kernels that a quantizer calls, under the names of te_hal.ops: bound, or the ops where it calls none."""

    quantize: Kernel = te_hal.ops.quantize
    quantize_current: Kernel = te_hal.ops.quantize_current


class PlanCasts(NamedTuple):
    """Kernels for the quantizers, by role; the ops themselves where nothing is cast."""

    input: CastKernels = OPS
    weight: CastKernels = OPS
    output: CastKernels = OPS
    grad_output: CastKernels = OPS
    grad_input: CastKernels = OPS
    input_again: CastKernels = OPS


@dataclass(frozen=True)
class LinearPlan:
    """Bound kernels and copies of one linear layer.

    Attributes:
        key: what the plan was made for.
        memo: dispatch's memo when the plan was made.
        selection: under which it was made; what belongs to the backward goes there too.
        order: memory order of columnwise copies.
        copies: which copies of each operand are made and kept; none without FP8.
        casts: kernels that make them.
        fprop, dgrad, wgrad: gemm kernels; None where no gradient is asked for.
        wgrad_into: by ``accumulate``, instead of wgrad where main_grad takes the result.
        dequantize_input, dequantize_weight: kernels that give wgrad and dgrad what the forward's codes stand for; None
            unless the recipe's backward_override says so.
        bias_grad: kernel; None where the bias needs no gradient.
        bias_grad_quantize: kernel that also casts grad_output; None unless both are wanted, by one cast.
    """

    key: PlanKey
    memo: object
    selection: Selection
    order: ColumnwiseOrder
    copies: LinearCopies
    casts: PlanCasts
    fprop: Kernel
    dgrad: Kernel | None
    wgrad: Kernel | None
    wgrad_into: dict[bool, Kernel]
    dequantize_input: Kernel | None
    dequantize_weight: Kernel | None
    bias_grad: Kernel | None
    bias_grad_quantize: Kernel | None


def make_plan(key: PlanKey) -> LinearPlan:
    """Ask for every kernel that the layer will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo = current_memo()
    backend = backend_for(key.device, "gemm")
    order, copies = backend.columnwise_order, LinearCopies()
    if key.formats is not None:
        copies = linear_copies(
            backend.gemm_copies,
            key.formats,
            dgrad=key.dgrad,
            wgrad=key.wgrad,
            keeps_original_input=key.keeps_original_input,
        )
    gemms = _Gemms(key, copies, order)
    fuses = key.main_grad_dtype is not None
    return LinearPlan(
        key=key,
        memo=memo,
        selection=current_selection(),
        order=order,
        copies=copies,
        casts=_casts(key, copies, order),
        fprop=gemms.fprop(),
        dgrad=gemms.dgrad() if key.dgrad else None,
        wgrad=gemms.wgrad() if key.wgrad and not fuses else None,
        wgrad_into=gemms.wgrad_into() if key.wgrad and fuses else {},
        dequantize_input=_dequantize(key, "input", copies.input_kept, order),
        dequantize_weight=_dequantize(key, "weight", copies.weight_kept, order),
        bias_grad=_bias_grad(key) if key.bias_grad else None,
        bias_grad_quantize=_bias_grad_quantize(key, copies, order),
    )


class _Gemms:
    """Resolves the gemm kernels of one plan."""

    def __init__(self, key: PlanKey, copies: LinearCopies, order: ColumnwiseOrder) -> None:
        self.key, self.copies, self.order = key, copies, order

    def fprop(self) -> Kernel:
        key, copies = self.key, self.copies
        a, b = self._kind("fprop", "input", copies.input_made), self._kind("fprop", "weight", copies.weight_made)
        out_dtype = key.result_dtype("output")
        out = out_dtype if key.writes_into else None
        return resolve(gemm_call("fprop", key.device, a, b, out_dtype, bias=key.bias_dtype, out=out)).kernel

    def dgrad(self) -> Kernel:
        key, copies = self.key, self.copies
        a, b = self._kind("dgrad", "grad_output", copies.grad_made), self._kind("dgrad", "weight", copies.weight_kept)
        out_dtype = key.result_dtype("grad_input")
        out = out_dtype if key.writes_into else None
        return resolve(gemm_call("dgrad", key.device, a, b, out_dtype, out=out)).kernel

    def wgrad(self) -> Kernel:
        return resolve(gemm_call("wgrad", self.key.device, *self._of_wgrad(), self.key.dtype)).kernel

    def wgrad_into(self) -> dict[bool, Kernel]:
        device, operands, dtype = self.key.device, self._of_wgrad(), self.key.main_grad_dtype
        return {
            accumulate: resolve(
                gemm_call("wgrad", device, *operands, dtype, out=dtype, accumulate=accumulate),
            ).kernel
            for accumulate in (False, True)
        }

    def _of_wgrad(self) -> tuple[Kind, Kind]:
        kept = self.copies.input_remade if self.key.keeps_original_input else self.copies.input_kept
        return self._kind("wgrad", "grad_output", self.copies.grad_made), self._kind("wgrad", "input", kept)

    def _kind(self, layout: str, role: str, copies: Copies) -> Kind:
        """Of an operand as a product reads it."""
        formats = self.key.formats
        if formats is None:
            return self.key.dtype
        hybrid = formats.hybrid(role)
        if hybrid is not None:
            copies = copies_read(self.copies, layout, role)
        return operand_kind(formats.read_by(layout, role), copies, self.order, self.key.dtype)


def _dequantize(key: PlanKey, role: str, kept: Copies, order: ColumnwiseOrder) -> Kernel | None:
    of = key.format_of(role)
    if of is None or key.override != "dequantized" or kept == NO_COPIES:
        return None
    return resolve(dequantize_call(key.device, of, kept, order, key.dtype)).kernel


def _bias_grad(key: PlanKey) -> Kernel:
    return resolve(Call("bias_grad", key.device, {"grad_output": key.dtype}, {"out_dtype": key.dtype})).kernel


def _bias_grad_quantize(key: PlanKey, copies: LinearCopies, order: ColumnwiseOrder) -> Kernel | None:
    of = key.format_of("grad_output")
    if of is None or key.grad_is_quantized or not key.bias_grad or not (key.dgrad or key.wgrad):
        return None
    made = of.kind(copies.grad_made, order)
    call = fused_call("bias_grad_quantize", key.device, {"grad_output": key.dtype}, made, delayed=of.delayed)
    return resolve(call).kernel


def _casts(key: PlanKey, copies: LinearCopies, order: ColumnwiseOrder) -> PlanCasts:
    """The casts that will run."""
    if key.formats is None:
        return PlanCasts()

    def bind(role: str, wanted: bool, dtype: torch.dtype, made: Copies, *, again: bool = False) -> CastKernels:
        hybrid = None if key.formats is None else key.formats.hybrid(role)
        if hybrid is not None and wanted:
            of_parts = copies.hybrid("input_again" if again else role)
            return hybrid_casts(key, hybrid, of_parts, order, Casts)  # type: ignore[no-any-return] # in their place
        of = key.format_of(role)
        if of is None or not wanted:
            return OPS  # type: ignore[no-any-return] # a module as a protocol
        call = cast_call(key.device, dtype, of.kind(made, order), delayed=of.delayed)
        return Casts(**{call.op: resolve(call).kernel})

    # A bias gradient comes from the same op as the cast, where that is one cast.
    by_bias_grad = key.bias_grad and key.formats.hybrid("grad_output") is None
    casts_gradient = (key.dgrad or key.wgrad) and not by_bias_grad and not key.grad_is_quantized
    return PlanCasts(
        input=bind("input", not key.input_is_quantized, key.dtype, copies.input_made),
        weight=bind("weight", True, key.dtype, copies.weight_made),
        output=bind("output", key.fp8_output, key.result_dtype("output"), ROWWISE),
        grad_output=bind("grad_output", casts_gradient, key.dtype, copies.grad_made),
        grad_input=bind("grad_input", key.fp8_grad, key.result_dtype("grad_input"), ROWWISE),
        input_again=bind("input", key.keeps_original_input, key.dtype, copies.input_remade, again=True),
    )
