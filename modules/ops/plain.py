"""Ops that are plain torch: Identity, Reshape, ConstantScale, Dropout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_number
from te_hal.modules.ops.input_checks import check_input
from te_hal.modules.ops.operation import BasicOperation
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Identity(BasicOperation):
    """Give the input itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input."""
        check_input(self.label, input)
        return input


class Reshape(BasicOperation):
    """Give the input in another shape.

    Args:
        shape: sizes; one of them may be -1.

    Raises:
        ArgumentError: no ints.
    """

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (shape,)
        if not all(type(size) is int and size >= -1 for size in sizes) or sizes.count(-1) > 1:
            raise ArgumentError("Reshape: shape", got=repr(shape), accepted="sizes, at most one -1", todo="correct it")
        self._shape, self._open = sizes, -1 in sizes
        self._known = math.prod(size for size in sizes if size >= 0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """A view where strides allow; a quantized one is dequantized."""
        check_input(self.label, input)
        count, known = input.numel(), self._known
        if (known == 0 or count % known) if self._open else count != known:
            raise ArgumentError(
                f"{self.label}: input",
                got=f"shape {tuple(input.shape)}",
                accepted=f"as many values as shape {self._shape} has",
                todo="check which op feeds this one",
            )
        return dequantized(input).reshape(self._shape)

    def extra_repr(self) -> str:
        """Shape, for ``print(model)``."""
        return f"shape={self._shape}"


class ConstantScale(BasicOperation):
    """Multiply by a number, in the input's dtype.

    Args:
        scale: the number.

    Raises:
        ArgumentError: none.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        check_number("ConstantScale: scale", scale)
        self.scale = scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input * scale``."""
        check_input(self.label, input)
        return dequantized(input) * self.scale

    def extra_repr(self) -> str:
        """Scale, for ``print(model)``."""
        return f"scale={self.scale}"


class Dropout(BasicOperation):
    """Drop elements in training, by torch's generator, and scale up the rest; the input itself otherwise.

    Args:
        p: share that is dropped.

    Raises:
        ArgumentError: outside of 0 to 1.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = check_number("Dropout: p", p, (0, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``input``."""
        check_input(self.label, input)
        if not self.training or not self.dropout_probability:
            return input
        return torch.nn.functional.dropout(dequantized(input), self.dropout_probability)

    def extra_repr(self) -> str:
        """Share, for ``print(model)``."""
        return f"p={self.dropout_probability}"
