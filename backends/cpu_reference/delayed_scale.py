"""update_delayed_scale in plain torch (docs/numerics.md, rules D1-D4)."""

from __future__ import annotations

import math

import torch

from te_hal.backends.cpu_reference.amax import is_zero
from te_hal.schema.formats import FLOAT32_MAX


def update_delayed_scale(
    amax_history: torch.Tensor,
    scale: torch.Tensor,
    *,
    reduced_amax: torch.Tensor | None = None,
    fp8_max: float,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """Roll the amax history of n tensors and renew their scales, all in place.

    Args:
        amax_history: fp32 ``[L, n]``; row 0 is the running amax, row L-1 the newest past one. Written.
        scale: fp32 ``[n]``, the scales in use. Written.
        reduced_amax: fp32 ``[n]``, amax over all ranks; an entry of zero means "not reduced" (D1). May be a view
            of ``amax_history``.
        fp8_max: largest finite magnitude of the format.
        margin: the scale is divided by ``2**margin``.
        amax_compute_algo: "max" over the window, or "most_recent".
    """
    newest = amax_history[0].clone()
    if reduced_amax is not None:
        newest = torch.where(is_zero(reduced_amax), newest, reduced_amax)
    rolls = ~is_zero(newest)
    rolled = torch.cat((amax_history[1:], newest[None]))
    window = torch.where(rolled.isnan(), 0.0, rolled).amax(0) if amax_compute_algo == "max" else newest
    rolled[0] = 0.0
    amax_history.copy_(torch.where(rolls, rolled, amax_history))

    quotient = torch.full_like(window, _largest_code(fp8_max, margin)) / window
    quotient = torch.where(quotient == float("inf"), FLOAT32_MAX, quotient)
    renews = rolls & torch.isfinite(window) & ~is_zero(window)
    scale.copy_(torch.where(renews, quotient, scale))


def _largest_code(fp8_max: float, margin: int) -> float:
    """``fp8_max * 2**-margin``, held to what fp32 can represent (D3)."""
    return min(math.ldexp(fp8_max, min(-margin, 256)), FLOAT32_MAX)
