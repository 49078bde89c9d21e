"""Backends with one planted fault each: cpu_reference's kernels, one of them wrong in a way that has happened."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.backends.cpu_reference import create_backend as create_reference
from te_hal.dispatch import ANY_DEVICE, Backend
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import SUPPORTED, Call, Code, Support
from te_hal.testing import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    Kernel = Callable[..., Any]

REFERENCE = create_reference()


def faulty(op: str, change: Callable[[Kernel], Kernel], supports: Callable[[Call], Support] | None = None) -> Backend:
    """cpu_reference with one kernel replaced; the new one keeps the old one's signature."""
    right = REFERENCE.kernels[op]
    wrong = change(right)
    # Not of itself: that would leave a loop on the reference's own function.
    wrong = right if wrong is right else functools.wraps(right)(wrong)
    return Backend(
        name="faulty",
        kernels={**REFERENCE.kernels, op: wrong},
        serves=frozenset({ANY_DEVICE}),
        supports=supports or REFERENCE.supports,
        gemm_copies=REFERENCE.gemm_copies,
    )


def off_by_a_percent(right: Kernel) -> Kernel:
    def rmsnorm_fwd(*operands, **flags):
        output, rstd = right(*operands, **flags)
        return output * 1.01, rstd

    return rmsnorm_fwd


def wrong_in_one_element(right: Kernel) -> Kernel:
    def gemm(*operands, **flags):
        product = right(*operands, **flags)
        if product.numel() > 100:
            product.view(-1)[77] *= 1.05
        return product

    return gemm


def accumulates_nothing(right: Kernel) -> Kernel:
    return lambda *operands, **flags: right(*operands, **{**flags, "accumulate": False})


def scaled_twice(right: Kernel) -> Kernel:
    def dequantize(input, *, out_dtype=None):
        row, row_factor, column, column_factor = input.tensors()
        factors = [None if f is None or f.dtype == torch.uint8 else f.square() for f in (row_factor, column_factor)]
        if row_factor is not None and row_factor.dtype == torch.uint8:
            factors = [row_factor, column_factor]
        return right(input.with_tensors((row, factors[0], column, factors[1])), out_dtype=out_dtype)

    return dequantize


def ties_go_up(right: Kernel) -> Kernel:
    """A cast whose product is nudged away from zero before it is rounded."""

    def quantize(input, scale=None, **settings):
        nudged = input if scale is None else input.float() * (1 + 2**-20)
        return right(nudged, scale, **settings)

    return quantize


def drops_nan(right: Kernel) -> Kernel:
    def quantize(input, *rest, **settings):
        return right(torch.where(input.isnan(), 0.0, input), *rest, **settings)

    return quantize


def columns_from_rows(right: Kernel) -> Kernel:
    """The columnwise copy is cast from what the rowwise copy stands for."""

    def quantize(input, scale=None, *, rowwise=True, columnwise=False, out=None, **settings):
        if not (rowwise and columnwise) or out is not None:
            return right(input, scale, rowwise=rowwise, columnwise=columnwise, out=out, **settings)
        rows = right(input, scale, rowwise=True, columnwise=False, **settings)
        again = REFERENCE.kernels["dequantize"](rows, out_dtype=input.dtype)
        columns = right(again, scale, rowwise=False, columnwise=True, **{**settings, "amax": None})
        return QuantizedStorage(
            format=rows.format,
            mode=rows.mode,
            shape=rows.shape,
            dtype=rows.dtype,
            rowwise_data=rows.rowwise_data,
            rowwise_scale_inv=rows.rowwise_scale_inv,
            columnwise_data=columns.columnwise_data,
            columnwise_scale_inv=columns.columnwise_scale_inv,
            columnwise_order=columns.columnwise_order,
        )

    return quantize


def writes_past_the_end(right: Kernel) -> Kernel:
    def rmsnorm_fwd(*operands, **flags):
        output, rstd = right(*operands, **flags)
        room = torch.empty(output.shape, dtype=output.dtype)
        room.copy_(output)
        end = room.storage_offset() + room.numel()
        if room.numel() and room.untyped_storage().nbytes() > end * room.element_size():
            room.as_strided((1,), (1,), end).fill_(1.0)
        return room, rstd

    return rmsnorm_fwd


def writes_past_an_operand(right: Kernel) -> Kernel:
    def amax(input, *, out=None):
        found = right(input, out=out)
        if out is not None:
            out.as_strided((1,), (1,), out.storage_offset() + 1).fill_(0.0)
        return found

    return amax


def stale_amax(right: Kernel) -> Kernel:
    """The amax of a call is recorded with the next one."""
    pending = [0.0]

    def quantize(input, scale=None, *, amax=None, **settings):
        recorded = None if amax is None else amax.clone()
        made = right(input, scale, amax=recorded, **settings)
        if amax is not None and recorded is not None:
            amax.fill_(max(amax.item(), pending[0]))
            pending[0] = recorded.item()
        return made

    return quantize


def sums_in_any_order(right: Kernel) -> Kernel:
    """A sum whose order changes from call to call; within the bound, so that only repeating it tells."""
    state = torch.Generator().manual_seed(0)

    def layernorm_bwd(grad_output, *rest, **flags):
        grad_input, grad_weight, grad_bias = right(grad_output, *rest, **flags)
        rows = grad_output.float().reshape(-1, grad_output.shape[-1])
        shuffled = rows[torch.randperm(len(rows), generator=state)]
        total = torch.zeros(rows.shape[-1])
        for row in shuffled:
            total = total + row
        return grad_input, grad_weight, total.to(grad_bias.dtype)

    return layernorm_bwd


def right_on_tiles_alone(right: Kernel) -> Kernel:
    """The last columns that fill no tile of 16 are left as they were allocated."""

    def softmax_bwd(grad_output, output, **flags):
        made = right(grad_output, output, **flags)
        whole = made.shape[-1] // 16 * 16
        result = torch.empty_like(made)
        result[..., :whole] = made[..., :whole]
        return result

    return softmax_bwd


def refuses_at_run_time(right: Kernel) -> Kernel:
    def gemm(a, b, **flags):
        if flags.get("layout") == "wgrad":
            message = "no kernel for wgrad"
            raise NotImplementedError(message)
        return right(a, b, **flags)

    return gemm


def refuses_what_nobody_listed(call: Call) -> Support:
    if call.op == "softmax_fwd" and call.kinds["mask"] is not None:
        return Support.no(Code.FLAG, "takes no mask")
    return REFERENCE.supports(call)


def reports_late(right: Kernel) -> Kernel:
    """The status of a call comes out of the next one."""
    pending: list[str] = []

    def amax(input, *, out=None):
        if pending:
            message = pending.pop()
            raise RuntimeError(message)
        if input.numel() == 1000:
            pending.append("launch failed: too many columns")
        return right(input, out=out)

    return amax


def shares_scratch(right: Kernel) -> Kernel:
    """One buffer for all threads: what a call leaves there, another one may overwrite before it is read."""
    held: list[torch.Tensor] = []

    def amax(input, *, out=None):
        held[:] = [right(input)]
        time.sleep(0.01)  # long enough for the other thread to come in between
        found = held[0] if held else torch.zeros(1)
        held[:] = [torch.zeros(1)]
        return found if out is None else torch.fmax(out, found.view(out.shape), out=out)

    return amax


def raises_in_supports(call: Call) -> Support:
    if call.op == "amax":
        message = "driver not initialised"
        raise RuntimeError(message)
    return SUPPORTED


def same(right: Kernel) -> Kernel:
    return right


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        op: where it is.
        change: makes the wrong kernel of the right one.
        kind: the finding that the case must have.
        says: words that it must have.
        case: id of a case that shows it.
        named: words that the report on every case of the op must have beside.
        supports: the capability answer, where that is what is wrong.
    """

    op: str
    change: Callable[[Kernel], Kernel]
    kind: Kind
    says: str
    case: str
    supports: Callable[[Call], Support] | None = None
    named: str = ""

    def backend(self) -> Backend:
        """The backend that has it."""
        return faulty(self.op, self.change, self.supports)


FAULTS = {
    "rmsnorm off by 1%": Fault("rmsnorm_fwd", off_by_a_percent, Kind.VALUES, "elements of output differ", "everyday"),
    "gemm wrong in one element": Fault("gemm", wrong_in_one_element, Kind.VALUES, "1 of 384 elements", "everyday"),
    "accumulate ignored": Fault(
        *("gemm", accumulates_nothing, Kind.VALUES, "accumulate=true is ignored", "out=fp32,accumulate=true"),
    ),
    "scale applied twice": Fault("dequantize", scaled_twice, Kind.VALUES, "scale_inv applied twice", "everyday"),
    "ties away from zero": Fault(
        "quantize", ties_go_up, Kind.VALUES, "ties are rounded away from zero", "values=ties,columnwise=true"
    ),
    "NaN dropped": Fault("quantize", drops_nan, Kind.NONFINITE, "NaN is dropped", "shape=13x37,values=nan"),
    "columnwise from rowwise": Fault(
        *("quantize", columns_from_rows, Kind.VALUES, "cast of the rowwise copy's values"),
        "shape=130x264,scale=none,mode=block_1x128,columnwise=true",
    ),
    "write past a result": Fault("rmsnorm_fwd", writes_past_the_end, Kind.OUTSIDE, "behind a buffer", "everyday"),
    "write past an operand": Fault("amax", writes_past_an_operand, Kind.OUTSIDE, "0 bytes past its end", "out=fp32"),
    "stale amax": Fault("quantize", stale_amax, Kind.VALUES, "elements of amax differ", "amax=fp32"),
    "sum in any order": Fault(
        "layernorm_bwd", sums_in_any_order, Kind.UNSTEADY, "grad_bias differs between", "shape=130x264,weight=fp32"
    ),
    "right on tiles alone": Fault(
        *("softmax_bwd", right_on_tiles_alone, Kind.NONFINITE, "elements of grad_input differ", "shape=13x37"),
        named="right only where the last size is a multiple of 16",
    ),
    "capability lie": Fault("gemm", refuses_at_run_time, Kind.LIE, "no kernel for wgrad", "layout=wgrad"),
    "refusal not listed": Fault(
        "softmax_fwd", same, Kind.UNLISTED, "takes no mask", "mask=bool", refuses_what_nobody_listed
    ),
    "late error status": Fault("amax", reports_late, Kind.LATE, "launch failed", "shape=1x1000"),
    "scratch shared by threads": Fault(
        "amax", shares_scratch, Kind.THREADS, "amax differs between two calls", "shape=128x128,run=threads"
    ),
    "supports raises": Fault("amax", same, Kind.SUPPORTS, "driver not initialised", "everyday", raises_in_supports),
}
