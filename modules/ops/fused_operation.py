"""FusedOperation: an op that is made of basic ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from te_hal.modules.ops.operation import BasicOperation, FusibleOperation
from te_hal.modules.ops.run import check_extra_inputs, run_operations
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class FusedOperation(FusibleOperation):
    """Basic ops that go by one name. In a Sequential they are fused with their neighbours, one by one.

    Args:
        basic_ops: in order.

    Raises:
        ArgumentTypeError: one is no basic op.
        ArgumentError: there are none.

    Attributes:
        basic_ops: a torch.nn.ModuleList; parameters and state are theirs.
    """

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        super().__init__()
        if not basic_ops:
            raise ArgumentError(type(self).__name__, got="no op", accepted="at least one", todo="pass its ops")
        for op in basic_ops:
            if not isinstance(op, BasicOperation):
                raise ArgumentTypeError(
                    type(self).__name__, got=f"a {type(op).__name__}", accepted="basic ops of te.ops", todo="pass those"
                )
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        self.num_extra_inputs = sum(op.num_extra_inputs for op in basic_ops)
        self.num_extra_outputs = sum(op.num_extra_outputs for op in basic_ops)

    @property
    def is_fused_op(self) -> bool:
        """Yes."""
        return True

    def basic_operations(self) -> Iterator[BasicOperation]:
        """The ops, in order."""
        for op in self.basic_ops:
            yield cast("BasicOperation", op)

    @run_eagerly
    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the ops.

        Args:
            input: of the first one.
            extra_inputs: as many as they take.

        Returns:
            The last one's output; with extra outputs a tuple of all.
        """
        ops = list(self.basic_operations())
        check_extra_inputs(type(self).__name__, ops, len(extra_inputs))
        output, extra_outputs = run_operations(ops, input, extra_inputs)
        return (output, *extra_outputs) if extra_outputs else output
