"""amax and compute_scale in plain torch (docs/numerics.md, A1 and S1 to S4)."""

from __future__ import annotations

import torch

from te_hal.backends.cpu_reference.chunks import as_rows, row_spans
from te_hal.schema.formats import FLOAT32_MAX

_INFINITY = float("inf")
_ALL_BUT_SIGN = 0x7FFFFFFF
_ALL_BUT_MANTISSA = -0x800000  # 0xFF800000 as an int32


def amax(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitude of ``input``; NaN elements are ignored, infinities are not (A1)."""
    values = input.detach()
    found = amax_of_extremes([torch.aminmax(values)] if values.numel() else [], values)
    if out is None:
        return found
    accumulate(out, found)
    return out


def accumulate(running: torch.Tensor, found: torch.Tensor) -> None:
    """``running = max(running, found)`` in place, for one element each; a NaN in ``running`` gives way (A1)."""
    running.copy_(torch.fmax(running, found.view(running.shape)))


def amax_of_extremes(extremes: list[tuple[torch.Tensor, torch.Tensor]], input: torch.Tensor) -> torch.Tensor:
    """Amax ``[1]`` of ``input`` from the (min, max) pairs of its pieces.

    A NaN passes through aminmax. It serves as the sign that there is one: only then a second pass leaves NaN out.
    """
    if not extremes:
        return torch.zeros(1, dtype=torch.float32, device=input.device)
    largest = torch.stack([end for pair in extremes for end in pair]).abs().amax().float().view(1)
    if largest.isnan():
        rows = as_rows(input)
        pieces = (rows[span].nan_to_num(nan=0.0, posinf=_INFINITY, neginf=-_INFINITY) for span in row_spans(rows))
        return amax_of_extremes([torch.aminmax(piece) for piece in pieces], input)
    return largest


def compute_scale(
    amax: torch.Tensor,
    *,
    fp8_max: float,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale that maps ``amax`` to ``fp8_max``: floor, division, overflow and power of two by S1 to S4."""
    floored = torch.where(amax < epsilon, epsilon, amax)
    scale = divide(fp8_max, floored, value_for_inf)
    scale = torch.where(is_zero(floored) | ~torch.isfinite(floored), 1.0, scale)
    return (scale.view(torch.int32) & _ALL_BUT_MANTISSA).view(torch.float32) if power_of_2 else scale


def divide(fp8_max: float, amax: torch.Tensor, value_for_inf: float) -> torch.Tensor:
    """``fp8_max / amax`` as one IEEE division, ``value_for_inf`` where that overflows (S3).

    Both sides are tensors: torch computes ``number / tensor`` as a reciprocal and a product, which rounds twice.
    """
    quotient = torch.full_like(amax, fp8_max) / amax
    return torch.where(quotient == _INFINITY, value_for_inf, quotient)


def is_zero(values: torch.Tensor) -> torch.Tensor:
    """Where fp32 values are zero, read from the bits: a subnormal is not, even in a process that flushes them (S2)."""
    return (values.view(torch.int32) & _ALL_BUT_SIGN) == 0
