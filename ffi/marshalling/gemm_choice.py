"""Which way a gemm goes on a device whose vendor has matrix products of its own, and the kernel that goes it.

The way follows from what the operands and the result are, is chosen before anything is launched, and is named in the
capability answer. What is left to the call are sizes, and with scales per block the copies that are there and what is
added: where the vendor's product does not take them, the operands are decoded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_hal.ffi.capability import ask
from te_hal.ffi.marshalling import block_matmul, gemm, plain_matmul, scaled_matmul
from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.formats import E2M1, E5M2
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.storage_kind import StorageKind
from te_hal.schema.support import Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.ffi.marshalling.block_matmul import BlockProduct
    from te_hal.ffi.native import Native
    from te_hal.schema.support import Call, Kind

    Operand = torch.Tensor | QuantizedStorage


class Way(str, enum.Enum):
    """How a product is made, as the capability answer says it."""

    SCALED = "torch._scaled_mm; decoded, then torch.mm where it does not take the sizes"
    PLAIN = "torch.mm"
    DECODED = "decoded to bf16, then torch.mm"
    BLOCKS = "torch's scaled_mm by blocks; dequantized, then torch.mm where it does not take the sizes or copies"
    GROUPWISE = "mate's groupwise product; dequantized, then torch.mm where it does not take sizes, copies or addends"
    DEQUANTIZED = "dequantized with the factors of its blocks, then torch.mm"
    PORTABLE = "the portable kernel"


_BY_BLOCKS = (Way.BLOCKS, Way.GROUPWISE, Way.DEQUANTIZED)


@dataclass(frozen=True)
class VendorGemm:
    """What torch's products can do on the devices of a backend.

    Attributes:
        choose: the way of a product, from its device, the kinds of ``a`` and ``b``, and the result's dtype; None: a
            quantized operand's nominal dtype, which its kind does not tell.
        fp32_product: torch.mm takes ``out_dtype=torch.float32`` for 16-bit operands.
        needs_rows: torch._scaled_mm reads rows of both operands along the contraction, and nothing else.
        block_product: behind Way.BLOCKS and Way.GROUPWISE.
    """

    choose: Callable[[torch.device, Kind, Kind, torch.dtype | None], Way]
    fp32_product: bool
    needs_rows: bool
    block_product: BlockProduct | None = None

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
        dtype = out_dtype or (a.dtype if out is None else out.dtype)
        way = self.choose(a.device, _kind(a), _kind(b), dtype)
        if way is Way.PORTABLE:
            return gemm.gemm(
                native, a, b, bias=bias, out=out, layout=layout, accumulate=accumulate, out_dtype=out_dtype
            )
        result = plain_matmul.Result(bias, out, dtype, accumulate=accumulate)
        if way is Way.SCALED:
            operands = scaled_matmul.orient(native, a, b, layout, needs_rows=self.needs_rows)
            if scaled_matmul.fits(operands):
                return scaled_matmul.multiply(operands, result)
        if way in _BY_BLOCKS:
            product = None if way is Way.DEQUANTIZED else self.block_product
            return self._multiply_blocks(native, a, b, layout, result, product)
        reads = ALONG_THE_SUM[layout]
        left, left_scale_inv = scaled_matmul.decode(native, a, reads.a)
        right, right_scale_inv = scaled_matmul.decode(native, b, reads.b)
        left = left.t() if layout == "wgrad" else left
        right = right.t() if layout == "fprop" else right
        scales = [scale for scale in (left_scale_inv, right_scale_inv) if scale is not None]
        return plain_matmul.multiply(left, right, scales, result, fp32_product=self.fp32_product)

    def _multiply_blocks(
        self,
        native: Native,
        a: Operand,
        b: Operand,
        layout: str,
        result: plain_matmul.Result,
        product: BlockProduct | None,
    ) -> torch.Tensor:
        """By the vendor's product where it is given and takes the operands, else from their values."""
        if product is not None and isinstance(a, QuantizedStorage) and isinstance(b, QuantizedStorage):
            factors = block_matmul.orient(native, a, b, layout)
            if factors is not None and product.fits(factors, result):
                return product.multiply(factors, result)
        left, right = block_matmul.dequantized(native, a, b, layout)
        return plain_matmul.multiply(left, right, [], result, fp32_product=self.fp32_product, dequantized=True)

    def supports(self, native: Native, call: Call) -> Support:
        """The library's answer; of a gemm, a yes that says which way it goes."""
        if call.op != "gemm":
            return ask(native, call)
        way = self.choose(call.device, call.kinds["a"], call.kinds["b"], _result_dtype(call))
        answer = ask(native, call)
        if answer.code is Code.MODE:
            return answer
        if not answer and way is Way.PORTABLE:
            return answer
        return Support(Code.YES, f"by {way.value}: {_reason(way, call)}")


def _reason(way: Way, call: Call) -> str:
    """Why a product goes this way, as far as operands and result tell; else it is the device or what is installed."""
    quantized = [kind.format for kind in (call.kinds["a"], call.kinds["b"]) if isinstance(kind, StorageKind)]
    if way is Way.PLAIN:
        return "no operand is quantized"
    if way in (Way.SCALED, Way.BLOCKS, Way.GROUPWISE):
        return "both operands are quantized, and the vendor multiplies them as they are"
    if way is Way.PORTABLE and len(quantized) == 1:
        return "one operand is quantized and the other is not, which no product of the vendor takes"
    if way is Way.DECODED and _result_dtype(call) in scaled_matmul.PRECISE_RESULTS and E2M1 not in quantized:
        return "for an fp32 result, or one in fp16, the vendor's FP8 product adds up too coarsely, or is not known"
    if way is Way.DECODED and quantized == [E5M2, E5M2]:
        return "the vendor does not multiply E5M2 by E5M2"
    return "the vendor has no product for these operands on this device, or it is not installed"


def _kind(operand: Operand) -> Kind:
    return operand.kind if isinstance(operand, QuantizedStorage) else operand.dtype


def _result_dtype(call: Call) -> torch.dtype | None:
    for kind in (call.flags["out_dtype"], call.kinds["out"], call.kinds["a"]):
        if isinstance(kind, torch.dtype):
            return kind
    return None
