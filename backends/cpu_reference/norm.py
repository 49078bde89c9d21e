"""LayerNorm and RMSNorm in plain torch (docs/numerics.md, rules N1-N4).

RMSNorm is LayerNorm without mean and beta; both share one forward and one backward here. Everything between input and
result is fp32, gamma and beta included, and the result is rounded once. Hugging Face's RMSNorm rounds to the input's
dtype *before* it multiplies by gamma, which changes a quarter of its bf16 results by one step (N2).

torch's own layer_norm is as close, but computes ``x * rstd + (-mean * rstd)``: a third of its fp32 results differ in
the last bit from the order of N2, which is what a cast of the fp32 result is defined by.
"""

from __future__ import annotations

import math

import torch

from te_hal.backends.cpu_reference.chunks import row_spans


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(input - mean) * rstd * gamma + beta`` over the last dimension (N1-N3)."""
    return _forward(input, weight, bias, epsilon, zero_centered_gamma, out_dtype)


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input * rstd * gamma`` over the last dimension (N1-N3)."""
    output, _, rstd = _forward(input, weight, None, epsilon, zero_centered_gamma, out_dtype)
    return output, rstd


def layernorm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`layernorm_fwd` (N4)."""
    return _backward(grad_output, input, mean, rstd, weight, zero_centered_gamma)


def rmsnorm_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`rmsnorm_fwd` with respect to input and weight (N4)."""
    grad_input, grad_weight, _ = _backward(grad_output, input, None, rstd, weight, zero_centered_gamma)
    return grad_input, grad_weight


def _forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    zero_centered_gamma: bool,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With ``bias`` LayerNorm, without RMSNorm."""
    rows, gamma = _rows(input), _gamma(weight, zero_centered_gamma)
    beta = None if bias is None else bias.to(torch.float32)
    output = torch.empty(rows.shape, dtype=out_dtype or input.dtype, device=input.device)
    mean = torch.zeros(rows.shape[0], dtype=torch.float32, device=input.device)
    rstd = _reciprocal_root(mean, epsilon)
    for span in row_spans(rows):
        values = rows[span].to(torch.float32)
        if beta is not None:
            mean[span] = values.mean(-1)
            values = values - mean[span].unsqueeze(1)
        rstd[span] = _reciprocal_root(values.square().mean(-1), epsilon)
        normalised = (values * rstd[span].unsqueeze(1)).mul_(gamma)
        output[span] = normalised if beta is None else normalised.add_(beta)
    leading = input.shape[:-1]
    return output.view(input.shape), mean.view(leading), rstd.view(leading)


def _backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With ``mean`` LayerNorm, without RMSNorm."""
    rows, grads, gamma = _rows(input), _rows(grad_output), _gamma(weight, zero_centered_gamma)
    centers = None if mean is None else mean.reshape(-1, 1)
    factors = rstd.reshape(-1, 1)
    grad_input = torch.empty(rows.shape, dtype=input.dtype, device=input.device)
    grad_gamma, grad_beta = torch.zeros_like(gamma), torch.zeros_like(gamma)
    for span in row_spans(rows):
        values = rows[span].to(torch.float32)
        if centers is not None:
            values = values - centers[span]
        normalised, grad = values * factors[span], grads[span].to(torch.float32)
        grad_beta += grad.sum(0)
        grad_gamma += (grad * normalised).sum(0)
        grad = grad * gamma
        away = normalised * (grad * normalised).mean(-1, keepdim=True)
        if centers is not None:
            away += grad.mean(-1, keepdim=True)
        grad_input[span] = (grad - away).mul_(factors[span])
    return grad_input.view(input.shape), grad_gamma.to(weight.dtype), grad_beta.to(weight.dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as ``[rows, H]``, also where a size is zero."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    gamma = weight.to(torch.float32)
    return gamma + 1.0 if zero_centered else gamma


def _reciprocal_root(mean_square: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The fp32 number nearest to ``1 / sqrt(mean_square + epsilon)``, the sum taken in fp32 (N1).

    By way of float64, because torch's fp32 rsqrt is one unit off here and there, depending on the CPU.
    """
    return torch.rsqrt((mean_square + epsilon).to(torch.float64)).to(torch.float32)
