"""Which way a gemm goes on a device whose vendor has matrix products of its own, and the kernel that goes it.

The way is chosen from what the operands are, before anything is launched; the capability answer names it. One thing
only is left to the call: torch._scaled_mm takes no odd sizes, and where they are odd the portable kernel runs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.ffi.capability import ask
from te_hal.ffi.marshalling import cast, gemm, plain_matmul, scaled_matmul
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.ffi.native import Native
    from te_hal.schema.support import Call, Kind

    Operand = torch.Tensor | QuantizedStorage


class Way(str, enum.Enum):
    """How a product is made."""

    SCALED = "torch._scaled_mm where its operands are aligned and their sizes multiples of 16, else the portable kernel"
    PLAIN = "torch.mm"
    DECODED = "dequantize to fp32, then torch.mm"
    PORTABLE = "the portable kernel"


@dataclass(frozen=True)
class VendorGemm:
    """What torch's products can do on the devices of a backend.

    Attributes:
        choose: the way of a product on a device, from the kinds of ``a`` and ``b``.
        fp32_product: torch.mm takes ``out_dtype=torch.float32`` for 16-bit operands.
        needs_rows: torch._scaled_mm reads rows of both operands along the contraction, and nothing else.
    """

    choose: Callable[[torch.device, Kind, Kind], Way]
    fp32_product: bool
    needs_rows: bool

    def gemm(
        self,
        native: Native,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        layout: str = "fprop",
        accumulate: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """te_hal.ops.gemm, the way that ``choose`` says."""
        way = self.choose(a.device, _kind(a), _kind(b))
        dtype = out_dtype or (a.dtype if out is None else out.dtype)
        if way is Way.SCALED:
            operands = scaled_matmul.orient(native, a, b, layout, needs_rows=self.needs_rows)
            if scaled_matmul.fits(operands):
                return scaled_matmul.multiply(operands, bias, out, dtype, accumulate=accumulate)
        elif way is not Way.PORTABLE:
            left, right = (_decoded(native, x) for x in (a, b))
            left = left.t() if layout == "wgrad" else left
            right = right.t() if layout == "fprop" else right
            widen = self.fp32_product
            return plain_matmul.multiply(left, right, bias, out, dtype, accumulate=accumulate, fp32_product=widen)
        return gemm.gemm(native, a, b, bias=bias, out=out, layout=layout, accumulate=accumulate, out_dtype=out_dtype)

    def supports(self, native: Native, call: Call) -> Support:
        """The library's answer; of a gemm, a yes that says which way it goes."""
        if call.op != "gemm":
            return ask(native, call)
        way = self.choose(call.device, call.kinds["a"], call.kinds["b"])
        answer = ask(native, call) if way in (Way.SCALED, Way.PORTABLE) else Support()
        return Support(Code.YES, f"by {way.value}") if answer else answer


def _kind(operand: Operand) -> Kind:
    return operand.kind if isinstance(operand, QuantizedStorage) else operand.dtype


def _decoded(native: Native, operand: Operand) -> torch.Tensor:
    if isinstance(operand, QuantizedStorage):
        return cast.dequantize(native, operand, out_dtype=torch.float32)
    return operand.detach()
