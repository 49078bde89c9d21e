"""Ops that take or give a tensor beside the one that goes through: the two ends of a residual."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from te_hal.modules.ops.input_checks import check_beside, check_input
from te_hal.modules.ops.operation import BasicOperation, Part
from te_hal.modules.rows import as_result
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.flags import check_flags


class AddExtraInput(BasicOperation):
    """``forward(input, extra)``: their sum, rounded once.

    Args:
        in_place: write the sum into the memory of ``extra``, which autograd does not notice: nothing else may read it.
            Behind a BasicLinear in a Sequential, product, bias and ``extra`` are then added in fp32 and rounded once
            (docs/numerics.md, G6).
    """

    part: ClassVar[Part | None] = Part.ADD
    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        check_flags("AddExtraInput", {"in_place": in_place})
        self.in_place = in_place

    def may_join(self) -> bool:
        """In place, as in Transformer Engine: elsewhere the product's result is rounded before the sum."""
        return self.in_place

    def forward(self, input: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        """Add.

        Args:
            input: any shape.
            extra: of that shape, dtype and device.

        Raises:
            ArgumentTypeError, ArgumentError: tensors that do not go together.
        """
        check_input(self.label, input)
        given = dequantized(input)
        check_beside(self.label, "extra input", extra, given, tuple(given.shape))
        output: torch.Tensor = _AddInto.apply(given, extra) if self.in_place else extra + given  # type: ignore[no-untyped-call]
        return output


class _AddInto(torch.autograd.Function):
    """``extra += input`` behind autograd's back."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:  # noqa: ANN401, ARG004
        return written_into(extra, extra + input)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401, ARG004
        return grad_output, grad_output


def written_into(memory: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result``, inside of a Function's forward, in the memory of a tensor of its shape that was given."""
    output = memory.detach().copy_(result)
    return as_result(output, output.shape)


class MakeExtraOutput(BasicOperation):
    """``forward(input)``: the input twice, once to go through and once as an extra output; gradients add up.

    Args:
        in_place: accepted, for callers written for Transformer Engine; in which memory gradients are added is torch's
            choice, and the sum is the same.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        check_flags("MakeExtraOutput", {"in_place": in_place})
        self.in_place = in_place

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input, twice."""
        check_input(self.label, input)
        return input, input
