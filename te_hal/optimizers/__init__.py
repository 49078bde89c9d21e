"""Optimizers under Transformer Engine's names: ``te_hal.modules.optimizers``.

Steps are vectorised over parameters in fp32 by plain torch, on any device. They differ from ``torch.optim``'s in what
they hold: fp32 master weights beside parameters of 16 or 8 bits, and moments in fewer bits with a scale each.
"""

from __future__ import annotations

from te_hal.optimizers.fused_adam import FusedAdam
from te_hal.optimizers.fused_sgd import FusedSGD
from te_hal.optimizers.multi_tensor import (
    LATER,
    MultiTensorApply,
    later,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
]


def __getattr__(name: str) -> object:
    if name in LATER:
        raise later(name)
    msg = f"module 'te_hal.optimizers' has no attribute {name!r}"
    raise AttributeError(msg)
