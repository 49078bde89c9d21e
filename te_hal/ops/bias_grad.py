"""Gradient of a bias, an optional op of the gemm family, and its composition in plain torch."""

from __future__ import annotations

import torch

from te_hal.dispatch import entry, register_composition
from te_hal.schema.gemm import BIAS_GRAD

_enter_bias_grad = entry(BIAS_GRAD)


def bias_grad(grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over rows, in fp32, rounded once (G5).

    Args:
        grad_output: ``[M, N]``; fp32, fp16 or bf16.
        out_dtype: fp32, fp16 or bf16; None: that of ``grad_output``.

    Returns:
        A new tensor ``[N]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_bias_grad(grad_output, out_dtype)
    result: torch.Tensor = kernel(grad_output, out_dtype=out_dtype)
    return result


def _compose(grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """The composition of bias_grad (G5)."""
    return torch.sum(grad_output, 0, dtype=torch.float32).to(out_dtype or grad_output.dtype)


register_composition("bias_grad", _compose)
