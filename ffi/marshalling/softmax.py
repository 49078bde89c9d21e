"""Scaled, masked softmax, forward and backward, through a kernel library."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native


def softmax_fwd(
    native: Native,
    input: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """te_hal.ops.softmax_fwd. The mask is read through its strides; broadcast dimensions are not written out."""
    values = contiguous(input)
    output = native.empty(values.shape, out_dtype or values.dtype, values.device)
    seen = None if mask is None else _four_dimensions(mask, values.shape)
    status = native.lib.api_softmax_fwd(
        native.library.api,
        address(values),
        codes.DTYPES[values.dtype],
        *_four_sizes(values.shape),
        scale,
        address(seen),
        *((0, 0, 0, 0) if seen is None else seen.stride()),
        codes.CAUSAL[causal],
        *window,
        address(output),
        codes.DTYPES[output.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "softmax_fwd")
    return output


def _four_sizes(shape: torch.Size) -> tuple[int, int, int, int]:
    """``[..., Sq, Sk]`` as outer, inner, queries and keys."""
    *leading, queries, keys = shape
    inner = leading[-1] if leading else 1
    return math.prod(leading[:-1]), inner, queries, keys


def _four_dimensions(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The mask as seen by each score: a view, unless more than two leading dimensions cannot be seen as two."""
    return mask.detach().expand(shape).reshape(_four_sizes(shape))


def softmax_bwd(
    native: Native,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float = 1.0,
    causal: str = "none",
    window: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """te_hal.ops.softmax_bwd."""
    grad, probabilities = contiguous(grad_output), contiguous(output)
    grad_input = native.empty(probabilities.shape, grad.dtype, probabilities.device)
    outer, inner, queries, keys = _four_sizes(probabilities.shape)
    status = native.lib.api_softmax_bwd(
        native.library.api,
        address(grad),
        codes.DTYPES[grad.dtype],
        address(probabilities),
        codes.DTYPES[probabilities.dtype],
        outer * inner,
        queries,
        keys,
        scale,
        codes.CAUSAL[causal],
        *window,
        address(grad_input),
        native.stream(probabilities.device),
    )
    if status:
        native.check(status, "softmax_bwd")
    return grad_input
