"""A BERT-shaped model trained in BF16 and in FP8 to fill in hidden letters.

    python examples/bert.py                  # seconds on a CPU
    python examples/bert.py --width 256 --layers 4 --steps 1000

The text is the documentation topics that come with Python, a byte a token, cut into lines of uneven length: what fills
up a batch is padding, which the attention of every other token passes over (`self_attn_mask_type="padding"`). Of the
bytes 15% are chosen: most are hidden, some replaced by others, some left as they are, and the model says what stood
there. It reads both directions, so that nothing after a hidden byte is kept from it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

import te_hal
import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES = 256
HIDDEN, PADDING, TOKENS = BYTES, BYTES + 1, BYTES + 16  # two more tokens, and rows that nothing uses
CHOSEN, OF_THEM_HIDDEN, OF_THEM_REPLACED = 0.15, 0.8, 0.1
SEQUENCE, BATCH = 64, 16
LAST = 20


class Batch(NamedTuple):
    """What a step reads: all ``[BATCH, SEQUENCE]``."""

    tokens: torch.Tensor
    is_padding: torch.Tensor
    asked: torch.Tensor
    answers: torch.Tensor


class Bert(nn.Module):
    """Layers over embedded tokens, and scores of every byte for every position."""

    def __init__(self, width: int, heads: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        made = [
            te.TransformerLayer(
                width,
                4 * width,
                heads,
                self_attn_mask_type="padding",
                layer_number=number + 1,
                params_dtype=dtype,
                attn_input_format="bshd",
                hidden_dropout=0.0,
                attention_dropout=0.0,
            )
            for number in range(layers)
        ]
        device = next(made[0].parameters()).device
        self.token = nn.Embedding(TOKENS, width, device=device)
        self.position = nn.Embedding(SEQUENCE, width, device=device)
        self.norm = nn.LayerNorm(width, device=device)
        self.head = nn.Linear(width, BYTES, device=device)
        self.layers = nn.ModuleList(made)
        self.dtype = dtype
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` int64, and bool ``[b, s]``, True where nothing stands, to ``[b, s, BYTES]`` fp32."""
        hidden = (self.token(tokens) + self.position.weight).to(self.dtype)
        mask = is_padding[:, None, None, :]  # [b, 1, 1, s]; True hides
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return self.head(self.norm(hidden.float()))


def lines() -> list[bytes]:
    """The text in stretches of 16 bytes to SEQUENCE."""
    found = (line.strip().encode() for key in sorted(topics) for line in topics[key].splitlines())
    return [line[:SEQUENCE] for line in found if len(line) >= SEQUENCE // 4]


def draw(text: Sequence[bytes], generator: torch.Generator) -> Batch:
    """Some lines, with a share of their bytes hidden."""
    answers = torch.full((BATCH, SEQUENCE), PADDING)
    for row, index in enumerate(torch.randint(len(text), (BATCH,), generator=generator).tolist()):
        answers[row, : len(text[index])] = torch.tensor(list(text[index]))
    is_padding = answers == PADDING
    drawn, fate = (torch.rand(BATCH, SEQUENCE, generator=generator) for _ in range(2))
    asked = (drawn < CHOSEN) & ~is_padding
    others = torch.randint(BYTES, (BATCH, SEQUENCE), generator=generator)
    tokens = torch.where(asked & (fate < OF_THEM_HIDDEN), HIDDEN, answers)
    replaced = asked & (fate >= OF_THEM_HIDDEN) & (fate < OF_THEM_HIDDEN + OF_THEM_REPLACED)
    return Batch(torch.where(replaced, others, tokens), is_padding, asked, answers)


def train(
    options: argparse.Namespace, text: Sequence[bytes], chosen: recipe.Recipe | None
) -> tuple[list[float], float, float]:
    """Losses, the share of right answers in the last steps, and milliseconds per step, from the same seed."""
    torch.manual_seed(0)
    model = Bert(options.width, options.heads, options.layers)
    device, generator = model.head.weight.device, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses, right, times = [], [], []
    for _ in range(options.steps):
        batch = Batch(*(part.to(device) for part in draw(text, generator)))
        start = time.perf_counter()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            scores = model(batch.tokens, batch.is_padding)
        asked, answers = scores[batch.asked], batch.answers[batch.asked]
        loss = nn.functional.cross_entropy(asked, answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - start))
        right.append((asked.argmax(dim=-1) == answers).float().mean().item())
    return losses, statistics.mean(right[-LAST:]), statistics.median(times)


def guessing(text: Sequence[bytes]) -> float:
    """Loss, in nats, of naming every byte as often as it occurs."""
    counts = torch.bincount(torch.tensor(list(b"".join(text))), minlength=BYTES)
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log()).sum().item()


def main() -> None:
    """Train once per recipe and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="choose one by name; default: the one of the default device")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    if options.backend is not None:
        te_hal.set_backend(options.backend)

    text = lines()
    delayed = recipe.DelayedScaling(amax_history_len=16)
    print(f"{len(text)} lines; {math.log(BYTES):.3f} nats without any idea, {guessing(text):.3f} by frequency of bytes")
    print(f"{'run':8s} {'first loss':>10s} {f'last {min(LAST, options.steps)}':>8s} {'right':>6s} {'ms/step':>8s}")
    for name, chosen in {"bf16": None, "delayed": delayed, "current": recipe.Float8CurrentScaling()}.items():
        losses, right, milliseconds = train(options, text, chosen)
        print(f"{name:8s} {losses[0]:10.4f} {statistics.mean(losses[-LAST:]):8.4f} {right:6.1%} {milliseconds:8.1f}")


if __name__ == "__main__":
    main()
