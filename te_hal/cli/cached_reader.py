"""How a GPT reads a text that grows byte by byte: each byte once, over a cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    import te_hal.modules as te


class CachedModel(Protocol):
    """A model that takes a cache."""

    def new_cache(self) -> te.InferenceParams:
        """An empty cache for one sequence of the model's longest length."""
        ...

    def __call__(self, windows: torch.Tensor, cache: te.InferenceParams | None = None) -> torch.Tensor:
        """Logits `[1, n, 256]` of the bytes after `windows`, `[1, n]`, which follow those in the cache."""
        ...


class CachedReader:
    """Logits of the byte after a text, which grows from call to call.

    A text that is longer than the model's longest sequence is read anew from a place half a sequence before its end,
    and goes on from there.

    Args:
        model: reads.
    """

    def __init__(self, model: CachedModel) -> None:
        self._model, self._cache = model, model.new_cache()
        self._start = self._read = 0

    def __call__(self, text: torch.Tensor) -> torch.Tensor:
        """Logits `[256]` of the byte after `text`, int64 `[n]`, which begins with the text of the call before."""
        longest = self._cache.max_sequence_length
        if len(text) - self._start > longest:
            self._start = self._read = len(text) - max(1, longest // 2)
            self._cache.reset()
        new = text[self._read :]
        self._cache.pre_step({"text": len(new)})
        logits = self._model(new[None], self._cache)
        self._read = len(text)
        return logits[0, -1]
