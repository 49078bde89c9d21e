"""`--model gpt`: a byte-level GPT of te_hal's TransformerLayer, or of layers with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import te_hal.modules as te
from te_hal.cli import experts
from te_hal.cli.cached_reader import CachedReader
from te_hal.cli.experts import ExpertsLayer
from te_hal.cli.fp8_layers import LayersInFp8
from te_hal.cli.text import BYTES

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig

_FFN = 4
_EMBEDDING_STD = 0.02


class ByteGpt(LayersInFp8):
    """Logits of the byte after each byte of a sequence.

    Embeddings, which are look-ups, and the head, whose rounding goes straight into the loss, are torch's and keep the
    parameters' dtype.

    Args:
        config: sizes.
        device: where parameters are made, in fp32, under torch's global seed.
    """

    def __init__(self, config: CompareConfig, device: torch.device) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(BYTES, width, device=device)
        self.position = nn.Embedding(config.sequence, width, device=device)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=_EMBEDDING_STD)
        self.layers = nn.ModuleList(_layer(config, index + 1, device) for index in range(config.layers))
        self._heads = config.heads
        self.norm = te.LayerNorm(width, params_dtype=torch.float32, device=device)
        self.head = nn.Linear(width, BYTES, device=device)

    def forward(self, windows: torch.Tensor, cache: te.InferenceParams | None = None) -> torch.Tensor:
        """Logits of the byte after each byte.

        Args:
            windows: int64 `[batch, n]`, n up to `sequence`.
            cache: holds the bytes before, as many of each window; the next step of it is these.

        Returns:
            `[batch, n, 256]` in the parameters' dtype.
        """
        first = 0 if cache is None else int(cache.get_seqlens_pre_step()[0])
        # In fp32, because torch sums the gradients of equal bytes in the weight's dtype, and in bf16 a long sum stops
        # growing.
        looked_up = nn.functional.embedding(windows, self.embedding.weight.float())
        looked_up = looked_up + self.position.weight[first : first + windows.shape[1]].float()
        hidden = looked_up.to(self.embedding.weight.dtype).transpose(0, 1).contiguous()
        given = {} if cache is None else {"inference_params": cache}
        for index, layer in enumerate(self.layers):
            with self.precision_of(index):
                hidden = layer(hidden, **given)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.transpose(0, 1)

    def new_cache(self) -> te.InferenceParams:
        """An empty cache for one sequence."""
        return te.InferenceParams(
            1,
            self.position.num_embeddings,
            num_heads_kv=self._heads,
            head_dim_k=self.position.embedding_dim // self._heads,
            dtype=self.embedding.weight.dtype,
            qkv_format="sbhd",
        )

    def reader(self) -> CachedReader:
        """Gives the logits of the byte after a text that grows from call to call."""
        return CachedReader(self)


def _layer(config: CompareConfig, number: int, device: torch.device) -> nn.Module:
    if config.experts:
        return ExpertsLayer(config, _FFN * config.width, number, device)
    return te.TransformerLayer(
        config.width,
        _FFN * config.width,
        config.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=number,
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
        params_dtype=torch.float32,
        device=device,
    )


def parameter_count(config: CompareConfig) -> int:
    """Parameters of the model that these options make."""
    width, ffn = config.width, _FFN * config.width
    attention = 2 * width + (width + 1) * 3 * width + (width + 1) * width
    mlp = 2 * width + (width + 1) * ffn + (ffn + 1) * width
    head = 2 * width + (width + 1) * BYTES
    layer = experts.parameter_count(config, ffn) if config.experts else attention + mlp
    return (BYTES + config.sequence) * width + config.layers * layer + head


def activations_per_token(config: CompareConfig) -> int:
    """Values kept for backward per byte.

    Per layer: the input; query, key and value, and their rows in the order that attention wants; attention's output;
    both norms' outputs; the input of the MLP; both sides of gelu. The last norm's input and output; logits, their
    probabilities and their gradient.
    """
    layer = (1 + 3 + 3 + 1 + 2 + 1 + 2 * _FFN) * config.width + config.heads
    if config.experts:
        layer = experts.activations_per_token(config, _FFN * config.width)
    return config.layers * layer + 2 * config.width + 3 * BYTES
