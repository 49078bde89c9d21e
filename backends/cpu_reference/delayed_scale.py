"""update_delayed_scale in plain torch (docs/numerics.md, D1 to D4)."""

from __future__ import annotations

import math

import torch

from te_hal.backends.cpu_reference.amax import divide, is_zero
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
    """Roll the amax history of n tensors and renew their scales, all in place (D1-D4).

    ``reduced_amax`` may be a view of ``amax_history``; where it is zero the history's own amax counts (D1).
    """
    newest = amax_history[0]
    if reduced_amax is not None:
        newest = torch.where(is_zero(reduced_amax), newest, reduced_amax)
    rolled = torch.cat((amax_history[1:], newest[None]))
    rolls = ~is_zero(newest)
    chosen = _window_maximum(rolled) if amax_compute_algo == "max" else rolled[-1].clone()
    rolled[0] = 0.0
    amax_history.copy_(torch.where(rolls, rolled, amax_history))

    renews = rolls & torch.isfinite(chosen) & ~is_zero(chosen)
    scale.copy_(torch.where(renews, divide(_scaled_maximum(fp8_max, margin), chosen, FLOAT32_MAX), scale))


def _window_maximum(window: torch.Tensor) -> torch.Tensor:
    """Maximum of each column, NaN ignored. Compared as integers, which order like the magnitudes they encode (D2)."""
    return torch.where(window.isnan(), 0.0, window).view(torch.int32).amax(0).view(torch.float32)


def _scaled_maximum(fp8_max: float, margin: int) -> float:
    """``fp8_max * 2**-margin``, held to the range of fp32 (D3)."""
    return min(math.ldexp(fp8_max, min(-margin, 256)), FLOAT32_MAX)
