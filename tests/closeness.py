"""How far a result lies from its float64 value, as a norm and element by element."""

from __future__ import annotations

import torch

#: Stored bits of the significand, and the exponent of the smallest normal number.
_SIGNIFICAND = {
    torch.float32: (23, -126),
    torch.float16: (10, -14),
    torch.bfloat16: (7, -126),
}

#: Half a unit in the last place of fp32, relative to the power of two below a value.
FP32_ROUNDING = 2.0**-24


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """``norm(result - exact) / norm(exact)``; 0 where both are zero or empty."""
    distance = (result.double() - exact.double()).norm().item()
    return distance / exact.double().norm().item() if distance else 0.0


def half_step(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of ``dtype`` at each value: the most that one rounding can move it."""
    bits, smallest = _SIGNIFICAND[dtype]
    _, exponent = torch.frexp(exact.double())
    return torch.exp2((exponent - 1).clamp(min=smallest).double() - bits - 1)


def roundings(result: torch.Tensor, exact: torch.Tensor, fp32_error: torch.Tensor) -> float:
    """The largest error of an element, in units of one rounding to result's dtype after an error of ``fp32_error``.

    At most 1 for a result that was rounded once.
    """
    if result.numel() == 0:
        return 0.0
    allowed = half_step(exact.abs() + fp32_error, result.dtype) + fp32_error
    return ((result.double() - exact.double()).abs() / allowed).max().item()
