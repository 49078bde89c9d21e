"""A T5-shaped encoder-decoder trained in BF16 and in FP8 to write sequences of digits backwards.

    python examples/t5.py                  # seconds on a CPU
    python examples/t5.py --width 256 --layers 4 --steps 1000

The encoder reads a sequence of uneven length, padded, in both directions; the decoder (`layer_type="decoder"`) writes
the answer digit by digit: it sees what it has written (`self_attn_mask_type="causal"`) and what the encoder gave but
for padding (`enc_dec_attn_mask_type="padding"`). As in T5, layers have RMSNorm, a gated activation and no biases;
positions are embedded. At the end each model answers for sequences that it was not trained on, one digit at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import NamedTuple

import torch
from torch import nn

import te_hal
import te_hal.modules as te
from te_hal import recipe

DIGITS = 10
START, END, PADDING, TOKENS = DIGITS, DIGITS + 1, DIGITS + 2, 16
SHORTEST, LENGTH, BATCH = 4, 16, 32
LAST = 20


class Batch(NamedTuple):
    """What a step reads: tokens ``[BATCH, LENGTH]``, what is padding ``[BATCH, 1, 1, LENGTH]``, and answers."""

    question: torch.Tensor
    is_padding: torch.Tensor
    written: torch.Tensor
    answer: torch.Tensor


class T5(nn.Module):
    """Encoder and decoder over embedded tokens, and scores of every token for every place of the answer."""

    def __init__(self, width: int, heads: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()

        def stack(**settings: str) -> nn.ModuleList:
            made = (
                te.TransformerLayer(
                    width,
                    2 * width,
                    heads,
                    normalization="RMSNorm",
                    activation="geglu",
                    bias=False,
                    attn_input_format="bshd",
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    params_dtype=dtype,
                    **settings,
                )
                for _ in range(layers)
            )
            return nn.ModuleList(made)

        self.encoder = stack(self_attn_mask_type="padding")
        self.decoder = stack(self_attn_mask_type="causal", layer_type="decoder", enc_dec_attn_mask_type="padding")
        device = next(self.encoder.parameters()).device
        self.token = nn.Embedding(TOKENS, width, device=device)
        self.position = nn.Embedding(LENGTH, width, device=device)
        self.norm = nn.RMSNorm(width, device=device)
        self.head = nn.Linear(width, TOKENS, bias=False, device=device)
        self.dtype = dtype
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.1)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` int64 to ``[b, s, width]``."""
        return (self.token(tokens) + self.position.weight[: tokens.shape[1]]).to(self.dtype)

    def encode(self, question: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """What the decoder attends to, ``[b, s, width]``."""
        hidden = self.embed(question)
        for layer in self.encoder:
            hidden = layer(hidden, attention_mask=is_padding)
        return hidden

    def decode(self, written: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Scores of the token behind each of those written, ``[b, s, TOKENS]`` fp32."""
        hidden = self.embed(written)
        nothing = torch.zeros(len(written), 1, 1, written.shape[1], dtype=torch.bool, device=written.device)
        for layer in self.decoder:
            hidden = layer(hidden, encoder_output=encoded, enc_dec_attn_mask=(nothing, is_padding))
        return self.head(self.norm(hidden.float()))


def draw(generator: torch.Generator, count: int = BATCH) -> Batch:
    """Sequences of SHORTEST to LENGTH - 1 digits and the same backwards, with an end behind each."""
    question, answer = (torch.full((count, LENGTH), PADDING) for _ in range(2))
    for row, length in enumerate(torch.randint(SHORTEST, LENGTH, (count,), generator=generator).tolist()):
        digits = torch.randint(DIGITS, (length,), generator=generator)
        question[row, :length], answer[row, :length] = digits, digits.flip(0)
        question[row, length] = answer[row, length] = END
    written = torch.cat([torch.full((count, 1), START), answer[:, :-1]], dim=1)
    return Batch(question, (question == PADDING)[:, None, None, :], written, answer)


def train(options: argparse.Namespace, chosen: recipe.Recipe | None) -> tuple[T5, list[float], float]:
    """The model, losses, and milliseconds per step, from the same seed."""
    torch.manual_seed(0)
    model = T5(options.width, options.heads, options.layers)
    device, generator = model.head.weight.device, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses, times = [], []
    for _ in range(options.steps):
        batch = Batch(*(part.to(device) for part in draw(generator)))
        start = time.perf_counter()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            encoded = model.encode(batch.question, batch.is_padding)
            scores = model.decode(batch.written, encoded, batch.is_padding)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch.answer.flatten(), ignore_index=PADDING)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - start))
    return model, losses, statistics.median(times)


@torch.no_grad()
def answers(model: T5, batch: Batch, chosen: recipe.Recipe | None) -> torch.Tensor:
    """What a model writes from nothing but the questions, the likeliest token at each place, ``[b, LENGTH]``."""
    written = torch.full((len(batch.question), LENGTH + 1), START, device=batch.question.device)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        encoded = model.encode(batch.question, batch.is_padding)
        for place in range(LENGTH):  # behind it stands what the causal mask hides
            scores = model.decode(written[:, :LENGTH], encoded, batch.is_padding)
            written[:, place + 1] = scores[:, place].argmax(dim=-1)
    return written[:, 1:]


def as_text(tokens: torch.Tensor) -> str:
    """Digits up to the end."""
    found = tokens.tolist()
    until_end = found[: found.index(END)] if END in found else found
    return "".join(str(token) if token < DIGITS else "?" for token in until_end)


def main() -> None:
    """Train once per recipe, print a table, and let each model answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="choose one by name; default: the one of the default device")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    if options.backend is not None:
        te_hal.set_backend(options.backend)

    delayed = recipe.DelayedScaling(amax_history_len=16)
    print(f"{math.log(TOKENS):.3f} nats without any idea, {math.log(DIGITS):.3f} knowing that it is a digit")
    last = f"last {min(LAST, options.steps)}"
    print(f"{'run':8s} {'first loss':>10s} {last:>8s} {'written right':>14s} {'ms/step':>8s}   an answer")
    for name, chosen in {"bf16": None, "delayed": delayed, "current": recipe.Float8CurrentScaling()}.items():
        model, losses, milliseconds = train(options, chosen)
        batch = Batch(*(part.to(model.head.weight.device) for part in draw(torch.Generator().manual_seed(1))))
        found, asked = answers(model, batch, chosen), batch.answer != PADDING
        right = (found == batch.answer)[asked].float().mean().item()
        print(
            f"{name:8s} {losses[0]:10.4f} {statistics.mean(losses[-LAST:]):8.4f} {right:14.1%} {milliseconds:8.1f}   "
            f"{as_text(batch.question[0])} -> {as_text(found[0])}"
        )


if __name__ == "__main__":
    main()
