"""What a trained model writes when it goes on from a piece of held-out text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from te_hal.cli.models import Model

_TEMPERATURE = 0.7


@torch.no_grad()
def write_on(model: Model, prompt: torch.Tensor, count: int, device: torch.device) -> str:
    """The prompt's continuation, drawn byte by byte with the same random numbers for every model.

    Args:
        model: reads any number of bytes, also under FP8; the GPT each byte once, over a cache.
        prompt: uint8 `[n]`.
        count: how many bytes.
        device: of the model.

    Returns:
        UTF-8, with a mark in place of what is none; empty where a probability is not finite.
    """
    draws = torch.Generator().manual_seed(0)
    text, next_logits = prompt.to(torch.int64), model.reader()
    for _ in range(count):
        logits = next_logits(text.to(device)).float().cpu()
        if not logits.isfinite().all():
            return ""
        probabilities = torch.softmax(logits / _TEMPERATURE, dim=0)
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=draws)])
    return bytes(text[len(prompt) :].tolist()).decode(errors="replace")
