"""The gemm family: any pairing of plain and quantized operands, in the three layouts of a linear layer.

Two ways lead to the same contract (docs/numerics.md, G1 to G4, B5, NV8: exact products, fp32 sums, scales, bias and the
accumulated `out` in fp32, one rounding). The general way decodes to fp32, multiplies in fp32 and rounds at the end.
The short way serves operands that bf16 holds exactly (bf16, E4M3, E5M2, blocks of these whose factors are powers of
two, as block_operand has it, and NVFP4 without its tensor scale) when everything else is bf16 too: `addmm` on CPU sums
in fp32 and applies alpha, bias and beta before its one rounding, at four times the speed. That was measured, not
promised by torch; tests/backends/cpu_reference/test_gemm.py holds it element by element.

Products are written to an `out`: such calls `torch.autocast` leaves alone, others it would round to its own dtype
first. Torch's global precision flags are neither read nor set: whoever lowers `torch.set_float32_matmul_precision`
lowers the general way too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.block_cast import dequantize_blocks
from te_hal.backends.cpu_reference.block_operand import is_exact_in_bf16
from te_hal.backends.cpu_reference.decode import decode
from te_hal.backends.cpu_reference.nvfp4_values import tensor_factor, unscaled_values
from te_hal.schema.backend import ALONG_THE_SUM, GemmCopies
from te_hal.schema.formats import FLOAT32_MAX, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    Operand = torch.Tensor | QuantizedStorage

_SMALLEST_NORMAL = 2.0**-126


def gemm(
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    layout: str = "fprop",
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``a @ b.T + bias`` (fprop), ``a @ b`` (dgrad) or ``a.T @ b`` (wgrad); rules G1 to G4, B5, NV8.

    Of a storage the rowwise copy is read where there is one, else the columnwise one; with blocks the one that lies
    along the sum. ``out`` may have any strides; with ``accumulate`` it is added to in fp32 before the rounding.
    """
    if out_dtype is None:
        out_dtype = a.dtype if out is None else out.dtype
    reads = ALONG_THE_SUM[layout]
    factors = _scale_factors(((a, reads.a), (b, reads.b)))
    added = out if accumulate else None
    if _bf16_is_exact((a, b), (bias, added), factors, out_dtype, reads):
        left, right = _oriented(a, b, layout, torch.bfloat16)
        result = _multiply_bf16(left, right, bias if added is None else added, factors)
    else:
        left, right = _oriented(a, b, layout, torch.float32)
        result = torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))
        for term in factors:
            result.mul_(term)
        for addend in (bias, added):
            if addend is not None:
                result.add_(addend.detach())
        result = result.to(out_dtype)
    return result if out is None else out.copy_(result)


def _bf16_is_exact(
    operands: tuple[Operand, Operand],
    addends: tuple[torch.Tensor | None, torch.Tensor | None],
    factors: list[float],
    out_dtype: torch.dtype,
    reads: GemmCopies,
) -> bool:
    """Whether bf16 `addmm` keeps the contract: one factor, at most one addend, all of it exact in bf16."""
    given = [addend for addend in addends if addend is not None]
    return (
        all(isinstance(x, QuantizedStorage) or x.dtype == torch.bfloat16 for x in operands)
        and out_dtype == torch.bfloat16
        and len(factors) <= 1
        and len(given) <= 1
        and all(addend.dtype == torch.bfloat16 for addend in given)
        and operands[0].device.type == "cpu"
        and _onednn_multiplies_bf16()
        and _is_exact(operands[0], reads.a)
        and _is_exact(operands[1], reads.b)
    )


def _is_exact(x: Operand, copy: str) -> bool:
    """Whether bf16 holds what is decoded of an operand that is bf16 or quantized; only blocks may have to be read."""
    if isinstance(x, torch.Tensor) or x.mode is ScalingMode.TENSOR or x.mode in NVFP4_MODES:
        return True
    return is_exact_in_bf16(x, rowwise=copy == "rowwise")


def _onednn_multiplies_bf16() -> bool:
    """Whether bf16 products run on the CPU's vector units. Without them `addmm` is right as well, but slow."""
    if not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - it has no public name


def _multiply_bf16(
    left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor | None, factors: list[float]
) -> torch.Tensor:
    """``factor * left @ right + addend``, rounded once. Never into a strided view: torch 2.7 rounds that twice."""
    alpha = factors[0] if factors else 1.0
    result = left.new_empty(left.shape[0], right.shape[1])
    if addend is None:
        return torch.addmm(left.new_zeros(1), left, right, beta=0, alpha=alpha, out=result)
    return torch.addmm(addend.detach(), left, right, alpha=alpha, out=result)


def _oriented(a: Operand, b: Operand, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands as they are multiplied, decoded to ``dtype``."""
    reads = ALONG_THE_SUM[layout]
    left, right = _plain(a, dtype, reads.a), _plain(b, dtype, reads.b)
    return (left.t() if layout == "wgrad" else left), (right.t() if layout == "fprop" else right)


def _plain(x: Operand, dtype: torch.dtype, copy: str) -> torch.Tensor:
    """The operand's values in ``dtype``: without the tensor's scale if it has one, exact; with those of its blocks."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(dtype)
    if x.mode in NVFP4_MODES:
        return unscaled_values(x, dtype, rowwise=copy == "rowwise")
    if x.mode is not ScalingMode.TENSOR:
        return dequantize_blocks(x, dtype, rowwise=copy == "rowwise")
    codes, _, transposed = x.copy_to_read()
    values = decode(codes, x.format, dtype)
    return values.t() if transposed else values


def _scale_factors(operands: tuple[tuple[Operand, str], ...]) -> list[float]:
    """What the product is multiplied by, in order (G3, NV8); nothing for operands whose scales are those of blocks.

    Two scales become one factor, their product rounded to fp32 (a Python float holds it exactly until then), unless
    it leaves the normal range of fp32: then they are applied one after the other, larger first, so that a sum of
    zero stays zero and a result within range is not lost on the way.
    """
    scales: list[float] = []
    for x, copy in operands:
        if isinstance(x, QuantizedStorage) and x.mode is ScalingMode.TENSOR:
            scales.append(x.copy_to_read()[1].item())
        elif isinstance(x, QuantizedStorage) and x.mode in NVFP4_MODES:
            scales.append(tensor_factor(x, rowwise=copy == "rowwise"))
    if len(scales) == 2:  # noqa: PLR2004 - both operands are quantized
        together = scales[0] * scales[1]
        if _SMALLEST_NORMAL <= together <= FLOAT32_MAX:
            return [together]
    return sorted(scales, reverse=True)
