"""LayerNorm as a module."""

from __future__ import annotations

from typing import ClassVar

from te_hal.modules.normalization import Normalization


class LayerNorm(Normalization):
    """Layer normalisation: `(x - mean) * rsqrt(var + eps) * gamma + beta`, with the biased variance.

    Statistics and the affine part are fp32, with one rounding at the end (docs/numerics.md, N1-N4).

    Arguments and errors: :class:`te_hal.modules.normalization.Normalization`.
    """

    op: ClassVar[str] = "layernorm"
