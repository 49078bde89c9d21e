"""LayerNorm and RMSNorm, forward and backward, through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols, scratch

if TYPE_CHECKING:
    from te_hal.ffi.native import Native

_OP_NORM_BWD = codes.OPS["norm_bwd"]


def layernorm_fwd(
    native: Native,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """te_hal.ops.layernorm_fwd."""
    mean = native.empty(input.shape[:-1], torch.float32, input.device)
    output, rstd = _forward(native, input, weight, bias, mean, epsilon, zero_centered_gamma, out_dtype)
    return output, mean, rstd


def rmsnorm_fwd(
    native: Native,
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """te_hal.ops.rmsnorm_fwd."""
    return _forward(native, input, weight, None, None, epsilon, zero_centered_gamma, out_dtype)


def _forward(
    native: Native,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    epsilon: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With ``bias`` and ``mean`` LayerNorm, without RMSNorm."""
    values, gamma = contiguous(input), contiguous(weight)
    beta = None if bias is None else contiguous(bias)
    output = native.empty(values.shape, out_dtype or values.dtype, values.device)
    rstd = native.empty(values.shape[:-1], torch.float32, values.device)
    rows, cols = rows_and_cols(values.shape)
    status = native.lib.api_norm_fwd(
        native.library.api,
        codes.RMSNORM if bias is None else codes.LAYERNORM,
        address(values),
        codes.DTYPES[values.dtype],
        rows,
        cols,
        address(gamma),
        codes.DTYPES[gamma.dtype],
        address(beta),
        codes.NO_DTYPE if beta is None else codes.DTYPES[beta.dtype],
        epsilon,
        codes.FLAG_ZERO_CENTERED_GAMMA if zero_centered_gamma else 0,
        address(output),
        codes.DTYPES[output.dtype],
        address(mean),
        address(rstd),
        native.stream(values.device),
    )
    if status:
        native.check(status, "rmsnorm_fwd" if bias is None else "layernorm_fwd")
    return output, rstd


def layernorm_bwd(
    native: Native,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """te_hal.ops.layernorm_bwd."""
    grad_bias = native.empty(weight.shape, weight.dtype, weight.device)
    grads = _backward(native, grad_output, input, mean, rstd, weight, grad_bias, zero_centered_gamma)
    return *grads, grad_bias


def rmsnorm_bwd(
    native: Native,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """te_hal.ops.rmsnorm_bwd."""
    return _backward(native, grad_output, input, None, rstd, weight, None, zero_centered_gamma)


def _backward(
    native: Native,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    grad_bias: torch.Tensor | None,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With ``mean`` and ``grad_bias`` LayerNorm, without RMSNorm."""
    grad, values, factors, gamma = (contiguous(tensor) for tensor in (grad_output, input, rstd, weight))
    centers = None if mean is None else contiguous(mean)
    grad_input = native.empty(values.shape, values.dtype, values.device)
    grad_weight = native.empty(gamma.shape, gamma.dtype, values.device)
    rows, cols = rows_and_cols(values.shape)
    kind, dtype = codes.RMSNORM if mean is None else codes.LAYERNORM, codes.DTYPES[values.dtype]
    workspace = native.workspace(values.device, _OP_NORM_BWD, rows=rows, cols=cols, kind=kind, input_dtype=dtype)
    status = native.lib.api_norm_bwd(
        native.library.api,
        kind,
        address(grad),
        codes.DTYPES[grad.dtype],
        address(values),
        dtype,
        rows,
        cols,
        address(centers),
        address(factors),
        address(gamma),
        codes.DTYPES[gamma.dtype],
        codes.FLAG_ZERO_CENTERED_GAMMA if zero_centered_gamma else 0,
        address(grad_input),
        address(grad_weight),
        address(grad_bias),
        *scratch(workspace),
        native.stream(values.device),
    )
    if status:
        native.check(status, "rmsnorm_bwd" if mean is None else "layernorm_bwd")
    return grad_input, grad_weight
