"""The router's functions, where Transformer Engine has them: ``from te_hal.modules.router import ...``."""

from __future__ import annotations

from te_hal.modules.moe.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from te_hal.modules.moe.routing_map import RoutingMapFormat

__all__ = [
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]
