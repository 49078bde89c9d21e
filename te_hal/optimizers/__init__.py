"""Optimizers under Transformer Engine's names: ``te_hal.modules.optimizers``.

Steps are vectorised over parameters in fp32 by plain torch, on any device. They differ from ``torch.optim``'s in what
they hold: fp32 master weights beside parameters of 16 or 8 bits, and moments in fewer bits with a scale each.
"""

from __future__ import annotations

from te_hal.optimizers.fused_adam import FusedAdam
from te_hal.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
