"""Activation functions, forward and backward, through a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols
from te_hal.schema.activation import GATED

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native

# What clamped_swiglu has where a call leaves it out (docs/numerics.md, V3).
_LIMIT, _ALPHA, _LINEAR_OFFSET = 7.0, 1.702, 1.0


def activation_fwd(
    native: Native,
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """te_hal.ops.activation_fwd."""
    values = contiguous(input)
    shape = result_shape(values.shape, activation)
    rows, cols = rows_and_cols(shape)
    output = native.empty(shape, out_dtype or values.dtype, values.device)
    status = native.lib.api_activation_fwd(
        native.library.api,
        codes.ACTIVATION_KINDS[activation],
        address(values),
        codes.DTYPES[values.dtype],
        rows,
        cols,
        *parameters(activation, limit, alpha, glu_linear_offset),
        address(output),
        codes.DTYPES[output.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "activation_fwd")
    return output


def activation_bwd(
    native: Native,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """te_hal.ops.activation_bwd."""
    grad, values = contiguous(grad_output), contiguous(input)
    rows, cols = rows_and_cols(grad.shape)
    grad_input = native.empty(values.shape, out_dtype or values.dtype, values.device)
    status = native.lib.api_activation_bwd(
        native.library.api,
        codes.ACTIVATION_KINDS[activation],
        address(grad),
        codes.DTYPES[grad.dtype],
        address(values),
        codes.DTYPES[values.dtype],
        rows,
        cols,
        *parameters(activation, limit, alpha, glu_linear_offset),
        address(grad_input),
        codes.DTYPES[grad_input.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "activation_bwd")
    return grad_input


def result_shape(shape: torch.Size, activation: str) -> tuple[int, ...]:
    """Of what the function makes from an input of ``shape``: gated kinds halve the last dimension."""
    return (*shape[:-1], shape[-1] // 2) if activation in GATED else tuple(shape)


def parameters(
    activation: str, limit: float | None, alpha: float | None, offset: float | None
) -> tuple[float, float, float]:
    """limit, alpha and offset of the entries: the defaults of V3 where left out, 0 where the function has none."""
    if activation != "clamped_swiglu":
        return 0.0, 0.0, 0.0
    return (
        _LIMIT if limit is None else limit,
        _ALPHA if alpha is None else alpha,
        _LINEAR_OFFSET if offset is None else offset,
    )
