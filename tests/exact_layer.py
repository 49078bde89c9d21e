"""A transformer layer in float64: what its arguments say, written out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from activation_reference import in_plain_torch
from norm_reference import normalised
from torch.nn import functional

if TYPE_CHECKING:
    import te_hal.modules as te


class Exact:
    """Over ``[b, s, H]``, with weights that are split.

    Args:
        module: whose weights.
        post: residuals are what norms gave.
        output_norm: a norm at the end instead of the first.
        parallel: attention and MLP read the same.
    """

    def __init__(
        self, module: te.TransformerLayer, *, post: bool = False, output_norm: bool = False, parallel: bool = False
    ) -> None:
        self.module, self.post, self.output_norm, self.parallel = module, post, output_norm, parallel
        self.wide = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
        layout = module.self_attention.head_layout
        self.heads, self.channels = layout.query_size // layout.channels, layout.channels

    def norm(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        mlp = self.module.layernorm_mlp
        gamma, beta = self.wide[f"{prefix}weight"], self.wide.get(f"{prefix}bias")
        return normalised(x, gamma, beta, mlp.eps, zero_centered=mlp.zero_centered_gamma)

    def linear(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.wide[f"{prefix}weight"], self.wide.get(f"{prefix}bias"))

    def attend(self, part: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden) -> torch.Tensor:
        """``hidden`` broadcasts to ``[b, h, sq, sk]``, True where a key is not seen."""
        query, key, value = (t.unflatten(-1, (-1, self.channels)).transpose(1, 2) for t in (query, key, value))
        key, value = (t.repeat_interleave(self.heads // t.shape[1], dim=1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.channels)
        context = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
        return self.linear(f"{part}.proj.", context.transpose(1, 2).flatten(2))

    def attention(self, normed: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
        prefix = "self_attention." + ("qkv." if self.output_norm else "layernorm_qkv.")
        query, key, value = (self.linear(f"{prefix}{part}_", normed) for part in ("query", "key", "value"))
        length = normed.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.attend("self_attention", query, key, value, causal if hidden is None else hidden)

    def inter_attention(self, normed: torch.Tensor, encoded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        query = self.linear("inter_attention.layernorm_query.query_", normed)
        key, value = (self.linear(f"inter_attention.key_value.{part}_", encoded) for part in ("key", "value"))
        return self.attend("inter_attention", query, key, value, hidden)

    def mlp(self, normed: torch.Tensor) -> torch.Tensor:
        activation = self.module.layernorm_mlp.activation
        inside = in_plain_torch(activation, self.linear("layernorm_mlp.fc1_", normed))
        return self.linear("layernorm_mlp.fc2_", inside)

    def __call__(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        hidden_of_encoded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        first = x if self.output_norm else self.norm("self_attention.layernorm_qkv.layer_norm_", x)
        attended = self.attention(first, hidden)
        if self.parallel:
            return x + attended + self.mlp(self.norm("layernorm_mlp.layer_norm_", x))
        between = (first if self.post else x) + attended
        if encoded is not None:
            normed = self.norm("inter_attention.layernorm_query.layer_norm_", between)
            nothing = torch.zeros((), dtype=torch.bool)
            seen = nothing if hidden_of_encoded is None else hidden_of_encoded
            between = (normed if self.post else between) + self.inter_attention(normed, encoded, seen)
        normed = self.norm("layernorm_mlp.layer_norm_", between)
        output = (normed if self.post else between) + self.mlp(normed)
        return self.norm("layernorm.", output) if self.output_norm else output
