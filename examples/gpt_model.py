"""A causal language model of te.TransformerLayer, and the same model in plain PyTorch.

    python examples/gpt_model.py        # how far apart the two are

gpt_tutorial.py trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import te_hal.modules as te

VOCABULARY = 96


@dataclass(frozen=True)
class Sizes:
    """Of model and training; the defaults are for an accelerator.

    With ``as_recorded`` layers get ``[b, s, h]`` where they read ``[s, b, h]``: each position attends to the sequences
    before it in the batch, not to the positions before it. The recorded curves behave so (their losses stay at what one
    number alone tells about the next); it is what handing them a batch as it comes does.
    """

    width: int = 768
    heads: int = 12
    layers: int = 4
    feed_forward: int = 3072
    sequence: int = 256
    batch: int = 16
    steps: int = 60
    learning_rate: float = 3e-4
    as_recorded: bool = False


FULL = Sizes()
SMALL = Sizes(width=64, heads=4, layers=2, feed_forward=256, sequence=32, batch=8, steps=40, learning_rate=1e-2)


class PlainLayer(nn.Module):
    """A transformer layer in plain PyTorch, with the values of a te.TransformerLayer without dropout."""

    def __init__(self, layer: te.TransformerLayer, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        given = {name: value.detach().clone() for name, value in layer.named_parameters()}
        qkv = "self_attention.layernorm_qkv"
        for kind in ("weight", "bias"):
            parts = [given.pop(f"{qkv}.{part}_{kind}") for part in ("query", "key", "value")]
            given[f"{qkv}.{kind}"] = torch.cat(parts)
        some = given[f"{qkv}.weight"]
        made = {"device": some.device, "dtype": some.dtype}
        self.norm1, self.norm2 = (nn.LayerNorm(sizes.width, **made) for _ in range(2))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, **made)
        self.proj = nn.Linear(sizes.width, sizes.width, **made)
        self.fc1 = nn.Linear(sizes.width, sizes.feed_forward, **made)
        self.fc2 = nn.Linear(sizes.feed_forward, sizes.width, **made)
        places = {
            "norm1": f"{qkv}.layer_norm_",
            "qkv": f"{qkv}.",
            "proj": "self_attention.proj.",
            "norm2": "layernorm_mlp.layer_norm_",
            "fc1": "layernorm_mlp.fc1_",
            "fc2": "layernorm_mlp.fc2_",
        }
        self.load_state_dict(
            {f"{own}.{kind}": given[f"{place}{kind}"] for own, place in places.items() for kind in ("weight", "bias")}
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        length, batch, width = hidden.shape
        mixed = self.qkv(self.norm1(hidden)).view(length, batch, 3 * self.heads, -1).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(*mixed.chunk(3, dim=1), is_causal=True)
        hidden = hidden + self.proj(attended.permute(2, 0, 1, 3).reshape(length, batch, width))
        return hidden + self.fc2(nn.functional.gelu(self.fc1(self.norm2(hidden)), approximate="tanh"))


class Gpt(nn.Module):
    """Logits of the number after each number of a sequence.

    Args:
        sizes: of the model.
        plain: layers in plain PyTorch; the same values either way, if torch was seeded alike.
        dtype: of everything but the last norm and the head, which are fp32: their rounding would go into the loss.
    """

    def __init__(self, sizes: Sizes, *, plain: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        layers = [
            te.TransformerLayer(
                sizes.width,
                sizes.feed_forward,
                sizes.heads,
                self_attn_mask_type="causal",
                layer_number=number + 1,
                params_dtype=dtype,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            )
            for number in range(sizes.layers)
        ]
        device = next(layers[0].parameters()).device  # a te module is made on the device of the backend in force
        self.token = nn.Embedding(VOCABULARY, sizes.width, device=device, dtype=dtype)
        self.position = nn.Embedding(sizes.sequence, sizes.width, device=device, dtype=dtype)
        self.as_recorded = sizes.as_recorded
        self.norm = nn.LayerNorm(sizes.width, device=device)
        self.head = nn.Linear(sizes.width, VOCABULARY, device=device)
        self.layers = nn.ModuleList(PlainLayer(layer, sizes) if plain else layer for layer in layers)

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.head.weight.device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` int64 to ``[b, s, VOCABULARY]`` fp32."""
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        if not self.as_recorded:
            hidden = hidden.transpose(0, 1).contiguous()  # te modules read [s, b, h]
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden.float()))
        return logits if self.as_recorded else logits.transpose(0, 1)


def main() -> None:
    """Give both models the same tokens."""
    tokens = torch.randint(VOCABULARY, (SMALL.batch, SMALL.sequence))
    for dtype in (torch.float32, torch.bfloat16):
        logits = []
        for plain in (False, True):
            torch.manual_seed(0)
            model = Gpt(SMALL, plain=plain, dtype=dtype)
            with torch.no_grad():
                logits.append(model(tokens.to(model.device)))
        off = (logits[0] - logits[1]).norm() / logits[1].norm()
        print(f"{dtype!s:15s} {sum(p.numel() for p in model.parameters())} parameters, logits {off:.1e} apart")


if __name__ == "__main__":
    main()
