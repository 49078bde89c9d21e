"""`--model mlp`: an MLP over a window of bytes that predicts the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import te_hal.modules as te
from te_hal.cli.fp8_layers import LayersInFp8
from te_hal.cli.text import BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.cli.config import CompareConfig

#: Features per byte of the window.
EMBEDDING = 16
#: FP8 gemms of every recipe take this many rows.
_ROWS = 32


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


class WindowMlp(LayersInFp8):
    """Logits of the byte that follows a window of bytes.

    All hidden linear layers are te_hal's and take a recipe. The embedding, which is a look-up, and the head, whose
    rounding goes straight into the loss, are torch's and keep the parameters' dtype.

    Args:
        config: sizes.
        device: where parameters are made, in fp32, under torch's global seed.
    """

    def __init__(self, config: CompareConfig, device: torch.device) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(BYTES, EMBEDDING, device=device)
        self.entry = te.Linear(config.sequence * EMBEDDING, width, params_dtype=torch.float32, device=device)
        self.layers = nn.ModuleList(ResidualBlock(width, device) for _ in range(config.layers))
        self.norm = te.LayerNorm(width, params_dtype=torch.float32, device=device)
        self.head = nn.Linear(width, BYTES, device=device)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Int64 windows `[batch, sequence]` to logits `[batch, 1, 256]` in the parameters' dtype."""
        # In fp32, because torch sums the gradients of equal bytes in the weight's dtype, and in bf16 a long sum stops
        # growing.
        looked_up = nn.functional.embedding(windows, self.embedding.weight.float())
        with self.precision_of(None):
            hidden = self.entry(looked_up.to(self.embedding.weight.dtype).flatten(1))
        for index, layer in enumerate(self.layers):
            with self.precision_of(index):
                hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.unsqueeze(1)

    def reader(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Gives the logits of the byte after a text that grows from call to call."""
        return self.next_logits

    def next_logits(self, context: torch.Tensor) -> torch.Tensor:
        """Logits `[256]` of the byte after `context`, int64 `[n]`; shorter ones are filled up with spaces in front."""
        length = self.entry.in_features // EMBEDDING
        window = nn.functional.pad(context[-length:], (max(0, length - len(context)), 0), value=ord(" "))
        logits: torch.Tensor = self(window.expand(_ROWS, -1))
        return logits[0, -1]


def parameter_count(config: CompareConfig) -> int:
    """Parameters of the model that these options make."""
    width = config.width
    entry = (config.sequence * EMBEDDING + 1) * width
    layer = 2 * width + (width + 1) * 2 * width + (2 * width + 1) * width
    head = 2 * width + (width + 1) * BYTES
    return BYTES * EMBEDDING + entry + config.layers * layer + head


def activations_per_token(config: CompareConfig) -> int:
    """Values kept for backward per window.

    The entry's input; per layer the norm's input and output, and both sides of gelu; the last norm's input and
    output; logits, their probabilities and their gradient.
    """
    return config.sequence * EMBEDDING + config.layers * 6 * config.width + 2 * config.width + 3 * BYTES
