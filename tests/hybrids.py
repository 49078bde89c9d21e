"""Hybrid quantizers of every kind, data for them, and what they should hold."""

from __future__ import annotations

import torch
from custom_recipes import BF16, E4M3, E5M2

import te_hal.modules as te

CHILDREN = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "1x128": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mxfp8": lambda: te.MXFP8Quantizer(E5M2),
    "nvfp4": te.NVFP4Quantizer,
    "identity": te.IdentityQuantizer,
}


def hybrid(pair: tuple[str, str], **settings: str) -> te.HybridQuantizer:
    return te.HybridQuantizer(
        rowwise_quantizer=CHILDREN[pair[0]](), columnwise_quantizer=CHILDREN[pair[1]](), **settings
    )


def data(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape or (32, 64), generator=torch.Generator().manual_seed(seed)).to(BF16)


def alone(name: str, x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """What one direction by itself stands for."""
    quantizer = CHILDREN[name]()
    quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
    result = quantizer(x)
    return result.dequantize() if isinstance(result, te.QuantizedTensor) else result


def parts(q: te.HybridQuantizedTensor) -> list[torch.Tensor]:
    return [part.dequantize() for part in (q._rowwise_storage, q._columnwise_storage) if part is not None]
