"""QuantizeObserver: who is told of everything that a quantizer quantizes.

The place where a monitor looks: a quantizer belongs to one module and one role, so its observer knows both, and
modules need to say nothing. Every method of a quantizer that makes codes ends by telling its observer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from te_hal.quantization.quantizer import Quantizer
    from te_hal.schema.storage import QuantizedStorage


class QuantizeObserver(Protocol):
    """Called after each quantization, outside of autograd."""

    def __call__(self, quantizer: Quantizer, tensor: torch.Tensor | None, storage: QuantizedStorage) -> None:
        """Look, and change nothing.

        Args:
            quantizer: that made the codes. Under delayed scaling its amax already holds this tensor's.
            tensor: what was quantized; None where a fused op made the codes and no plain tensor existed.
            storage: the codes.
        """
        ...
