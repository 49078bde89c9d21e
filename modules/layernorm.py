"""LayerNorm as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.modules.normalization import Normalization

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class LayerNorm(Normalization):
    """Layer normalisation: `(x - mean) * rsqrt(var + eps) * gamma + beta`, with the biased variance.

    Statistics and the affine part are fp32, with one rounding at the end (docs/numerics.md, N1-N4).

    Args:
        normalized_shape: trailing sizes that are normalised together.
        eps: added to the variance.
        sequence_parallel: of a later feature; True is refused.
        params_dtype: older name of ``dtype``.
        zero_centered_gamma: gamma is stored minus one, starts at 0, and the one is added in fp32.
        hidden_size: older name of ``normalized_shape``.
        device: None: the current backend's.
        dtype: of the parameters; None: torch's default dtype.
        sm_margin: for NVIDIA kernels; anything but None and 0 is refused.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: no shape, or two that differ.
    """

    op: ClassVar[str] = "layernorm"

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            sequence_parallel,
            params_dtype,
            zero_centered_gamma,
            hidden_size,
            device,
            dtype,
            sm_margin,
        )
