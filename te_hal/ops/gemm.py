"""The gemm family: the three products of a linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema.gemm import GEMM

if TYPE_CHECKING:
    import torch

    from te_hal.schema.storage import QuantizedStorage

_enter_gemm = entry(GEMM)


def gemm(
    a: torch.Tensor | QuantizedStorage,
    b: torch.Tensor | QuantizedStorage,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    layout: str = "fprop",
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One of the products of ``y = x @ w.T + bias``, from plain and quantized operands (G1 to G4, B5).

    Products are exact, sums are fp32 in any order, scales and bias are applied in fp32, one rounding at the end. Two
    quantized operands are of one family: per tensor, blocks of 128, or MXFP8; a plain one goes with any. With scales
    per block, the copies are read whose blocks lie along the sum, where they are there.

    Args:
        a: fprop: input ``[M, K]``; dgrad, wgrad: grad_output ``[M, N]``. fp32, fp16, bf16, E4M3 or E5M2.
        b: fprop, dgrad: weight ``[N, K]``; wgrad: input ``[M, K]``. The same dtypes.
        bias: ``[N]``, layout fprop only.
        out: receives the result, written in place: ``[M, N]``, ``[M, K]`` or ``[N, K]`` by layout.
        layout: ``"fprop"``: a @ b.T; ``"dgrad"``: a @ b; ``"wgrad"``: a.T @ b.
        accumulate: add to ``out`` instead of overwriting it.
        out_dtype: fp32, fp16 or bf16; None: that of ``out``, else a's (nominal) dtype.

    Returns:
        The product; ``out`` itself where given.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_gemm(a, b, bias, out, layout, accumulate, out_dtype)
    result: torch.Tensor = kernel(a, b, bias=bias, out=out, layout=layout, accumulate=accumulate, out_dtype=out_dtype)
    return result
