"""LayerNorm, RMSNorm and L2Normalization as ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.modules import layernorm, rmsnorm
from te_hal.modules.activation_dtype import activation_dtype, plain_input
from te_hal.modules.arguments import check_epsilon, check_prepared_sizes
from te_hal.modules.attention.qk_norm import L2Norm
from te_hal.modules.normalization import Normalization
from te_hal.modules.ops.input_checks import check_input
from te_hal.modules.ops.operation import BasicOperation, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class _FrontNorm(Normalization, BasicOperation):
    """What the norms with parameters share: the op's arguments, and that a product may follow in the same pass."""

    part: ClassVar[Part | None] = Part.FRONT

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            zero_centered_gamma=zero_centered_gamma,
            device=device,
            dtype=dtype,
            sm_margin=sm_margin,
        )

    def may_join(self) -> bool:
        """Where rows are normalised each by itself, as a product reads them."""
        return len(self.normalized_shape) == 1


class LayerNorm(_FrontNorm, layernorm.LayerNorm):
    """Layer normalisation over the trailing sizes (docs/numerics.md, N1 to N4).

    Before a BasicLinear in a Sequential, under FP8, it quantizes its result in one pass (F1).

    Args:
        normalized_shape: trailing sizes that are normalised together.
        eps: added under the root.
        device: None: the current backend's.
        dtype: of the parameters; None: torch's default dtype.
        zero_centered_gamma: gamma is stored minus one, starts at 0, and the one is added in fp32.
        sm_margin: for kernels that leave multiprocessors free; anything but 0 is refused.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: a shape, ``eps``, dtype or device that is none.
    """


class RMSNorm(_FrontNorm, rmsnorm.RMSNorm):
    """Root mean square normalisation over the trailing sizes; as :class:`LayerNorm`, without a bias."""


class L2Normalization(L2Norm, BasicOperation):
    """``x / sqrt(sum(x ** 2) + eps)`` over the last dimension, in fp32, rounded once; no parameters.

    Args:
        eps: added under the root.
        seq_length, micro_batch_size: sizes that kernels could be prepared for; there is nothing to prepare.

    Raises:
        ArgumentError: ``eps`` is negative or no number; a size that is no positive int.
    """

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__(check_epsilon("L2Normalization: eps", eps))
        check_prepared_sizes("L2Normalization", seq_length, micro_batch_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Same shape as ``input``, in the activation dtype.

        Raises:
            ArgumentTypeError, ArgumentError: no tensor, or of a dtype that no kernel takes.
        """
        check_input(self.label, input)
        return super().forward(plain_input(input, activation_dtype(self.label, input)))
