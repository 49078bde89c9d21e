"""A pre-norm transformer layer of te_hal's LayerNorm and Linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

import te_hal.modules as te

if TYPE_CHECKING:
    import torch


class TransformerLayer(nn.Module):
    """`x + proj(attention(qkv(norm(x))))`, then `x + fc2(gelu(fc1(norm(x))))`; input and output `[s, b, h]`.

    Args:
        hidden_size: features of input and output.
        ffn_hidden_size: features between fc1 and fc2.
        num_attention_heads: which divide the features.
        params_dtype, device: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        params_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._heads = num_attention_heads
        self.norm1 = te.LayerNorm(hidden_size, params_dtype=params_dtype, device=device)
        self.qkv = te.Linear(hidden_size, 3 * hidden_size, params_dtype=params_dtype, device=device)
        self.proj = te.Linear(hidden_size, hidden_size, params_dtype=params_dtype, device=device)
        self.norm2 = te.LayerNorm(hidden_size, params_dtype=params_dtype, device=device)
        self.fc1 = te.Linear(hidden_size, ffn_hidden_size, params_dtype=params_dtype, device=device)
        self.fc2 = te.Linear(ffn_hidden_size, hidden_size, params_dtype=params_dtype, device=device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """One layer under a causal mask; dtype and shape of the input are kept."""
        length, batch, width = input.shape
        rows = self.qkv(self.norm1(input)).view(length, batch, self._heads, -1)
        query, key, value = (part.permute(1, 2, 0, 3) for part in rows.chunk(3, dim=-1))
        read = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = input + self.proj(read.permute(2, 0, 1, 3).reshape(length, batch, width))
        widened = nn.functional.gelu(self.fc1(self.norm2(hidden)), approximate="tanh")
        output: torch.Tensor = hidden + self.fc2(widened)
        return output
