"""The model that `te-hal compare` trains: an MLP over a window of bytes that predicts the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import te_hal.modules as te

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig

BYTES = 256
#: Features per byte of the window.
EMBEDDING = 16


class ResidualBlock(nn.Module):
    """`x + Linear(gelu(Linear(norm(x))))`, twice as wide inside. Input and output `[batch, width]`."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.norm = te.LayerNorm(width, params_dtype=torch.float32, device=device)
        self.widen = te.Linear(width, 2 * width, params_dtype=torch.float32, device=device)
        self.narrow = te.Linear(2 * width, width, params_dtype=torch.float32, device=device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """One block; dtype and shape of the input are kept."""
        hidden = nn.functional.gelu(self.widen(self.norm(input)), approximate="tanh")
        output: torch.Tensor = input + self.narrow(hidden)
        return output


class WindowMlp(nn.Module):
    """Logits of the byte that follows a window of bytes.

    All hidden linear layers are te_hal's and take a recipe. The embedding, which is a look-up, and the head, whose
    rounding goes straight into the loss, are torch's and keep the parameters' dtype.

    Args:
        config: sizes.
        context: bytes in a window.
        device: where parameters are made, in fp32, under torch's global seed.
    """

    def __init__(self, config: CompareConfig, context: int, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, EMBEDDING, device=device)
        self.entry = te.Linear(context * EMBEDDING, config.width, params_dtype=torch.float32, device=device)
        self.blocks = nn.ModuleList(ResidualBlock(config.width, device) for _ in range(config.layers))
        self.norm = te.LayerNorm(config.width, params_dtype=torch.float32, device=device)
        self.head = nn.Linear(config.width, BYTES, device=device)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Int64 windows `[batch, context]` to logits `[batch, 256]` in the parameters' dtype."""
        # In fp32, because torch sums the gradients of equal bytes in the weight's dtype, and in bf16 a long sum stops
        # growing.
        looked_up = nn.functional.embedding(windows, self.embedding.weight.float())
        hidden = self.entry(looked_up.to(self.embedding.weight.dtype).flatten(1))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits
