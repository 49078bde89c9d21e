"""Which layers of a model run in FP8: all of them, or some, as for a first careful step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

import te_hal.modules as te


class LayersInFp8(nn.Module):
    """A model whose layers can be taken out of the autocast around it.

    Attributes:
        layers: the model's layers.
        fp8_layers: indices of those that stay in it; None: the whole model.
    """

    layers: nn.ModuleList

    def __init__(self) -> None:
        super().__init__()
        self.fp8_layers: frozenset[int] | None = None

    def precision_of(self, layer: int | None) -> AbstractContextManager[object]:
        """The context that a layer runs in; None: what is no layer."""
        if self.fp8_layers is None or layer in self.fp8_layers:
            return nullcontext()
        return te.autocast(enabled=False)

    def parts(self) -> dict[str, nn.Module]:
        """The model's children by name, each of its layers by itself."""
        layers = {f"layers.{index}": layer for index, layer in enumerate(self.layers)}
        children = ({name: child} if child is not self.layers else layers for name, child in self.named_children())
        return {name: child for group in children for name, child in group.items()}
