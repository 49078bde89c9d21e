"""The activation family (optional ops): activation functions, gated or not, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema.activation import ACTIVATION_BWD, ACTIVATION_FWD

if TYPE_CHECKING:
    import torch

_enter_activation_fwd = entry(ACTIVATION_FWD)
_enter_activation_bwd = entry(ACTIVATION_BWD)


def activation_fwd(
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An activation function, computed in fp32, rounded once (V1 to V3).

    Args:
        input: ``[..., F]``, or ``[..., 2F]`` for gated kinds: first half activated, second half multiplies.
        activation: which function.
        limit: clamped_swiglu only; None: 7.0.
        alpha: clamped_swiglu only; None: 1.702.
        glu_linear_offset: clamped_swiglu only; None: 1.0.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        A new tensor ``[..., F]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_fwd(input, activation, limit, alpha, glu_linear_offset, out_dtype)
    result: torch.Tensor = kernel(
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=out_dtype,
    )
    return result


def activation_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gradient of :func:`activation_fwd` with respect to its input, computed in fp32, rounded once (V1 to V3).

    Args:
        grad_output: gradient of the output, ``[..., F]``.
        input: as in the forward.
        activation: as in the forward.
        limit: as in the forward.
        alpha: as in the forward.
        glu_linear_offset: as in the forward.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        A new tensor of input's shape.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_activation_bwd(grad_output, input, activation, limit, alpha, glu_linear_offset, out_dtype)
    result: torch.Tensor = kernel(
        grad_output,
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=out_dtype,
    )
    return result
