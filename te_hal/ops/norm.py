"""The norm family: layer norm and RMS norm over the last dimension, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import entry
from te_hal.schema import norm as schemas

if TYPE_CHECKING:
    import torch

_enter_layernorm_fwd = entry(schemas.LAYERNORM_FWD)
_enter_layernorm_bwd = entry(schemas.LAYERNORM_BWD)
_enter_rmsnorm_fwd = entry(schemas.RMSNORM_FWD)
_enter_rmsnorm_bwd = entry(schemas.RMSNORM_BWD)


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(input - mean) * rstd * gamma + beta``, computed in fp32, rounded once (N1 to N3).

    Args:
        input: ``[..., H]``; fp32, fp16 or bf16, as weight and bias.
        weight: gamma ``[H]``.
        bias: beta ``[H]``.
        epsilon: added to the variance, not negative.
        zero_centered_gamma: ``weight`` holds gamma - 1; the one is added in fp32.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        output of input's shape; mean and rstd of each row, fp32, shape ``[...]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_layernorm_fwd(input, weight, bias, epsilon, zero_centered_gamma, out_dtype)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernel(
        input, weight, bias, epsilon=epsilon, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    return result


def layernorm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`layernorm_fwd`, computed in fp32, rounded once (N4).

    Args:
        grad_output: ``[..., H]``; fp32, fp16 or bf16, as input and weight.
        input: ``[..., H]``, as in the forward.
        mean: fp32 ``[...]``, from the forward.
        rstd: fp32 ``[...]``, from the forward.
        weight: ``[H]``, as in the forward.
        zero_centered_gamma: as in the forward.

    Returns:
        grad_input (shape and dtype of input); grad_weight and grad_bias (shape and dtype of weight).

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_layernorm_bwd(grad_output, input, mean, rstd, weight, zero_centered_gamma)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernel(
        grad_output, input, mean, rstd, weight, zero_centered_gamma=zero_centered_gamma
    )
    return result


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input * rstd * gamma``, computed in fp32, rounded once (N1 to N3).

    Args:
        input: ``[..., H]``; fp32, fp16 or bf16, as weight.
        weight: gamma ``[H]``.
        epsilon: added to the mean square, not negative.
        zero_centered_gamma: ``weight`` holds gamma - 1; the one is added in fp32.
        out_dtype: fp32, fp16 or bf16; None: that of ``input``.

    Returns:
        output of input's shape; rstd of each row (one over its root mean square), fp32, shape ``[...]``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_rmsnorm_fwd(input, weight, epsilon, zero_centered_gamma, out_dtype)
    result: tuple[torch.Tensor, torch.Tensor] = kernel(
        input, weight, epsilon=epsilon, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    return result


def rmsnorm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`rmsnorm_fwd`, computed in fp32, rounded once (N4).

    Args:
        grad_output: ``[..., H]``; fp32, fp16 or bf16, as input and weight.
        input: ``[..., H]``, as in the forward.
        rstd: fp32 ``[...]``, from the forward.
        weight: ``[H]``, as in the forward.
        zero_centered_gamma: as in the forward.

    Returns:
        grad_input (shape and dtype of input); grad_weight (shape and dtype of weight).

    Raises:
        ArgumentError, ArgumentTypeError: an argument breaks the above, or operands lie on several devices.
        UnsupportedError: the backend in force, and every fallback the policy lists, lacks this combination.
    """
    kernel = _enter_rmsnorm_bwd(grad_output, input, rstd, weight, zero_centered_gamma)
    result: tuple[torch.Tensor, torch.Tensor] = kernel(
        grad_output, input, rstd, weight, zero_centered_gamma=zero_centered_gamma
    )
    return result
