"""A small stack of attention layers that can be run whole, or step by step over a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import te_hal.modules as te

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN, HEADS, GROUPS, CHANNELS, LAYERS, LONGEST = 32, 4, 2, 8, 2, 24


class Stack(torch.nn.Module):
    """MultiheadAttention layers with residuals, rotary embedding and one of attention's features each."""

    def __init__(self, qkv_format: str = "bshd", **arguments: object) -> None:
        super().__init__()
        given = {"attention_dropout": 0.0, "num_gqa_groups": GROUPS, "input_layernorm": True, **arguments}
        self.layers = torch.nn.ModuleList(
            te.MultiheadAttention(HIDDEN, HEADS, layer_number=number + 1, qkv_format=qkv_format, **given)
            for number in range(LAYERS)
        )
        self.angles = te.RotaryPositionEmbedding(CHANNELS)(2 * LONGEST)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, hidden: torch.Tensor, **arguments: object) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden, rotary_pos_emb=self.angles.to(hidden.device), **arguments)
        return hidden


def cache(**arguments: object) -> te.InferenceParams:
    given = {"num_heads_kv": GROUPS, "head_dim_k": CHANNELS, "dtype": torch.float32, **arguments}
    return te.InferenceParams(4, LONGEST, **given)


class Generation:
    """Feeds tokens of named sequences through a stack and a cache, in any format, and keeps what came out of each."""

    def __init__(self, stack: Stack, params: te.InferenceParams, tokens: Mapping[object, torch.Tensor]) -> None:
        self.stack, self.params, self.tokens = stack, params, tokens
        self.given = dict.fromkeys(tokens, 0)
        self.outputs: dict[object, list[torch.Tensor]] = {name: [] for name in tokens}

    def step(self, new: Mapping[object, int], **arguments: object) -> None:
        parts = [self.tokens[name][self.given[name] : self.given[name] + count] for name, count in new.items()]
        self.params.pre_step(new)
        output = self.stack(self._batch(parts), inference_params=self.params, **arguments)
        for row, (name, count) in enumerate(new.items()):
            self.outputs[name].append(self._row(output, row, parts)[:count])
            self.given[name] += count

    def _batch(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.params.qkv_format == "thd":
            return torch.cat(parts)
        # What lies behind a sequence's tokens is nobody's.
        rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=7.0)
        return rows if self.params.qkv_format == "bshd" else rows.transpose(0, 1)

    def _row(self, output: torch.Tensor, row: int, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.params.qkv_format == "thd":
            start = sum(len(part) for part in parts[:row])
            return output[start : start + len(parts[row])]
        return output[row] if self.params.qkv_format == "bshd" else output[:, row]

    def output(self, name: object) -> torch.Tensor:
        return torch.cat(self.outputs[name])


def whole(stack: Stack, tokens: torch.Tensor, **arguments: object) -> torch.Tensor:
    """One sequence by itself, in one forward without a cache."""
    layers = stack.layers
    formats = [(layer.qkv_format, layer.core_attention.qkv_format) for layer in layers]
    try:
        for layer in layers:
            layer.qkv_format = layer.core_attention.qkv_format = "bshd"
        return stack(tokens.unsqueeze(0), **arguments).squeeze(0)
    finally:
        for layer, (own, inner) in zip(layers, formats, strict=True):
            layer.qkv_format, layer.core_attention.qkv_format = own, inner
