"""What is done with a product whose bias comes after it, through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols, scratch

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native

_OP_BIAS_ACTIVATION_BWD = codes.OPS["bias_activation_bwd"]


def bias_activation_fwd(
    native: Native,
    input: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """te_hal.ops.bias_activation_fwd."""
    values, added = contiguous(input), contiguous(bias)
    rows, cols = rows_and_cols(values.shape)
    output = native.empty(values.shape, out_dtype or values.dtype, values.device)
    status = native.lib.api_bias_activation_fwd(
        native.library.api,
        codes.ACTIVATION_KINDS[activation],
        address(values),
        codes.DTYPES[values.dtype],
        rows,
        cols,
        address(added),
        codes.DTYPES[added.dtype],
        address(output),
        codes.DTYPES[output.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "bias_activation_fwd")
    return output


def bias_activation_bwd(
    native: Native,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """te_hal.ops.bias_activation_bwd."""
    grad, values, added = contiguous(grad_output), contiguous(input), contiguous(bias)
    rows, cols = rows_and_cols(values.shape)
    device, dtype = values.device, codes.DTYPES[values.dtype]
    grad_input = native.empty(values.shape, out_dtype or values.dtype, device)
    grad_bias = native.empty(added.shape, added.dtype, device) if bias_grad else None
    workspace = (
        native.workspace(device, _OP_BIAS_ACTIVATION_BWD, rows=rows, cols=cols, input_dtype=dtype)
        if bias_grad
        else None
    )
    status = native.lib.api_bias_activation_bwd(
        native.library.api,
        codes.ACTIVATION_KINDS[activation],
        address(grad),
        codes.DTYPES[grad.dtype],
        address(values),
        dtype,
        rows,
        cols,
        address(added),
        codes.DTYPES[added.dtype],
        address(grad_input),
        codes.DTYPES[grad_input.dtype],
        address(grad_bias),
        codes.NO_DTYPE if grad_bias is None else codes.DTYPES[grad_bias.dtype],
        *scratch(workspace),
        native.stream(device),
    )
    if status:
        native.check(status, "bias_activation_bwd")
    return grad_input, grad_bias


def bias_residual(native: Native, input: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """te_hal.ops.bias_residual."""
    values, added, onto = contiguous(input), contiguous(bias), contiguous(residual)
    rows, cols = rows_and_cols(values.shape)
    output = native.empty(values.shape, onto.dtype, values.device)
    status = native.lib.api_bias_residual(
        native.library.api,
        address(values),
        codes.DTYPES[values.dtype],
        rows,
        cols,
        address(added),
        codes.DTYPES[added.dtype],
        address(onto),
        codes.DTYPES[onto.dtype],
        address(output),
        codes.DTYPES[output.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "bias_residual")
    return output
