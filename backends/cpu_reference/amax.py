"""amax and compute_scale in plain torch (docs/numerics.md, rules A1 and S1-S4)."""

from __future__ import annotations

import torch

from te_hal.backends.cpu_reference.chunks import as_rows, row_spans
from te_hal.schema.formats import FLOAT32_MAX

_MAGNITUDE_BITS = 0x7FFFFFFF
_SIGN_AND_EXPONENT_BITS = -0x800000  # 0xFF800000 as int32


def amax(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitude of ``input``; NaN elements are ignored, infinities are not (A1).

    Args:
        input: fp32, fp16 or bf16, any shape and strides.
        out: fp32, one element; becomes ``max(out, amax)`` in place.

    Returns:
        ``out`` where given, else a new fp32 tensor of shape ``[1]``. Of an empty or all-NaN tensor: 0.
    """
    found = _largest(input)
    if out is None:
        return found
    accumulate(out, found)
    return out


def accumulate(running: torch.Tensor, found: torch.Tensor) -> None:
    """``running = max(running, found)`` in place for one-element tensors; a NaN in ``running`` gives way (A1)."""
    running.copy_(torch.fmax(running, found.view(running.shape)))


def extremes_to_amax(extremes: list[tuple[torch.Tensor, torch.Tensor]], input: torch.Tensor) -> torch.Tensor:
    """Amax ``[1]`` of ``input`` from the (min, max) pairs of all its pieces.

    aminmax carries NaN along. That is used as the sign that there is one; only then a second pass ignores them.
    """
    largest = torch.stack([end for pair in extremes for end in pair]).abs().amax().float().view(1)
    return _largest_without_nan(input) if largest.isnan() else largest


def _largest(input: torch.Tensor) -> torch.Tensor:
    if input.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=input.device)
    return extremes_to_amax([torch.aminmax(input)], input)


def _largest_without_nan(input: torch.Tensor) -> torch.Tensor:
    rows = as_rows(input)
    infinity = float("inf")
    pieces = [rows[span].nan_to_num(nan=0.0, posinf=infinity, neginf=-infinity) for span in row_spans(rows)]
    return torch.stack([end for piece in pieces for end in torch.aminmax(piece)]).abs().amax().float().view(1)


def compute_scale(
    amax: torch.Tensor,
    *,
    fp8_max: float,
    epsilon: float = 0.0,
    power_of_2: bool = False,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale that maps ``amax`` to ``fp8_max``, element by element.

    Args:
        amax: fp32, any shape.
        fp8_max: largest finite magnitude of the format.
        epsilon: floor of amax (S1).
        power_of_2: round the scale down to a power of two (S4).
        value_for_inf: what a quotient that overflows becomes (S3).

    Returns:
        fp32, shape of ``amax``: 1 where amax is zero, infinite or NaN (S2).
    """
    floored = torch.where(amax < epsilon, epsilon, amax)
    scale = torch.full_like(floored, fp8_max) / floored
    scale = torch.where(scale == float("inf"), value_for_inf, scale)
    scale = torch.where(is_zero(floored) | ~torch.isfinite(floored), 1.0, scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT_BITS).view(torch.float32)
    return scale


def is_zero(values: torch.Tensor) -> torch.Tensor:
    """Where fp32 values are zero, told from the bits: subnormals are not, even if the process flushes them (S2)."""
    return (values.contiguous().view(torch.int32) & _MAGNITUDE_BITS) == 0
