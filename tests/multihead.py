"""A small MultiheadAttention with weights of its own, for tests."""

from __future__ import annotations

import torch

import te_hal.modules as te

B, S, HIDDEN, HEADS, GROUPS, CHANNELS = 2, 6, 32, 4, 2, 10
#: How the weight that gives queries, keys and values is stored.
STORED = {
    "split": {"fuse_qkv_params": False},
    "interleaved": {"fuse_qkv_params": True},
    "concatenated": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}


def made(**arguments: object) -> te.MultiheadAttention:
    module = te.MultiheadAttention(
        HIDDEN, HEADS, **{"kv_channels": CHANNELS, "num_gqa_groups": GROUPS, "attention_dropout": 0.0, **arguments}
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module
