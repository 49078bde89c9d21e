"""The keys and values of one layer, of all sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from te_hal.modules.inference.step import Step


class LayerCache:
    """Tokens of one layer.

    Args:
        tokens: how many there is room for.
        heads: of keys and values.
        channels: of a head of keys, and of values.
        dtype: of both.
        device: of both.

    Attributes:
        keys, values: ``[tokens, heads, channels]``; 0 where nothing was written.
        steps: the step that was written last, from 1; 0 before the first.
    """

    def __init__(
        self, tokens: int, heads: int, channels: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(mode=False):
            self.keys, self.values = (torch.zeros(tokens, heads, size, dtype=dtype, device=device) for size in channels)
        self.steps = 0

    def check_turn(self, where: str, current: int, *, begun: bool) -> None:
        """Whether it is this layer's turn to write a step: each step once, and none left out.

        Args:
            where: the layer, for messages.
            current: number of the step, from 1.
            begun: whether sequences of the step have tokens from before.

        Raises:
            StateError: it has written this step already; it has missed one that sequences still need.
        """
        if self.steps == current:
            raise StateError(
                where,
                got=f"a second write of step {current}: a forward without its own pre_step, a module that runs twice "
                "in one, or a second layer of this number",
                accepted="one pre_step before each forward, and in it one write by each layer_number",
                todo="call pre_step before each forward, also of a single token; give each layer its own layer_number, "
                "also those that share weights: a module each, with the parameters of one; "
                "after a forward that was interrupted, reset() and feed the sequences anew",
            )
        if self.steps < current - 1 and begun:
            raise StateError(
                where,
                got=f"step {current} after step {self.steps}: a step in between was not finished by all layers",
                accepted="every step of the sequences that are in the cache, in every layer",
                todo="after a forward that was interrupted, reset() and feed the sequences anew; else pass "
                "inference_params to this layer with every forward",
            )

    @torch.no_grad()
    def clear(self, blocks: list[int], size: int) -> None:
        """Zeros in blocks of ``size`` tokens, where other sequences may have left numbers that are none."""
        for tensor in (self.keys, self.values):
            for block in blocks:
                tensor[block * size : (block + 1) * size].zero_()

    @torch.no_grad()
    def write(self, step: Step, keys: torch.Tensor, values: torch.Tensor, *, packed: bool) -> None:
        """Put new tokens in their places.

        Args:
            step: where.
            keys: ``[b, s, heads, channels]``, each sequence's tokens at the front of its row; packed ``[t, ...]``.
            values: the same.
            packed: which of the two.
        """
        written = step.written(keys.device)
        for cache, new in ((self.keys, keys), (self.values, values)):
            if packed:
                rows = new[: written.shape[0]]
            else:
                flat = new.reshape(-1, *new.shape[2:])
                whole = written.shape[0] == flat.shape[0]
                rows = flat if whole else flat.index_select(0, step.given(new.shape[1], new.device))
            cache.index_copy_(0, written, rows)

    @torch.no_grad()
    def read(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b, longest, heads, channels]`` after the step, 0 beyond a sequence's end.

        Views of the cache where sequences lie in rows at equal distances, else copies.
        """
        stretch = step.stretch()
        both = (self.keys, self.values)
        if stretch is not None:
            first, distance = stretch
            keys, values = (self._rows(tensor, first, distance, step) for tensor in both)
            return keys, values
        absent = step.absent(self.keys.device)
        index = step.read(self.keys.device)
        shape = (len(step.after), step.longest)
        found = [tensor.index_select(0, index).view(*shape, *tensor.shape[1:]) for tensor in both]
        if absent is not None:
            found = [tensor.masked_fill_(absent[..., None, None], 0.0) for tensor in found]
        return found[0], found[1]

    @staticmethod
    def _rows(tensor: torch.Tensor, first: int, distance: int, step: Step) -> torch.Tensor:
        size = (len(step.after), step.longest, *tensor.shape[1:])
        strides = (distance * tensor.stride(0), *tensor.stride())
        return tensor.as_strided(size, strides, first * tensor.stride(0))
