"""Sequential: ops and modules one after the other, neighbours run as one where there is a fused op for them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.ops.operation import FusibleOperation
from te_hal.modules.ops.run import check_extra_inputs, run_operations
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sequential(torch.nn.Sequential):
    """A torch.nn.Sequential in which neighbouring ops are fused; docs/fusible_ops.md says which, with what rounding.

    Indexing, slices, ``append``, ``extend``, ``insert``, ``pop`` and sums are torch's.

    Args:
        args: ops of te.ops and torch modules; or one dict from name to these.

    Raises:
        ArgumentTypeError: something else.
    """

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - modules, or a dict of them
        if len(args) == 1 and isinstance(args[0], dict):
            args = (OrderedDict(args[0]),)
        wrong = [each for each in args if not isinstance(each, (torch.nn.Module, OrderedDict))]
        if wrong:
            raise ArgumentTypeError(
                "Sequential",
                got=f"a {type(wrong[0]).__name__}",
                accepted="modules, or one dict of them",
                todo="correct it",
            )
        super().__init__(*args)

    def __iadd__(self, other: Iterable[torch.nn.Module]) -> Sequential:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Append all modules of another Sequential or any iterable."""
        for module in other:
            self.append(module)
        return self

    def __add__(self, other: Iterable[torch.nn.Module]) -> Sequential:
        """A new one with the modules of both."""
        return Sequential(*self, *other)

    @run_eagerly
    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run all of them.

        Args:
            input: of the first one.
            extra_inputs: as many as the ops take together (``num_extra_inputs``), in order.

        Returns:
            The last one's output; with extra outputs a tuple of the output and these, in order.

        Raises:
            ArgumentError: another number of extra inputs; else as the ops.
        """
        runs = _runs_of(self)
        ops = [op for run in runs if isinstance(run, list) for op in run]
        check_extra_inputs("Sequential", ops, len(extra_inputs))
        flowing, waiting = input, list(extra_inputs)
        extra_outputs: list[torch.Tensor] = []
        for run in runs:
            if not isinstance(run, list):
                flowing = run(flowing)
                continue
            taken = sum(op.num_extra_inputs for op in run)
            flowing, more = run_operations(run, flowing, waiting[:taken])
            waiting, extra_outputs = waiting[taken:], [*extra_outputs, *more]
        return (flowing, *extra_outputs) if extra_outputs else flowing


def _runs_of(modules: Sequential) -> list[list[FusibleOperation] | torch.nn.Module]:
    """Ops that follow one another, in lists; every other module by itself.

    An op that is made of several counts as these, unless it has hooks.
    """
    runs: list[list[FusibleOperation] | torch.nn.Module] = []
    current: list[FusibleOperation] = []
    for module in modules:
        if not isinstance(module, FusibleOperation):
            current = []
            runs.append(module)
            continue
        if not current:
            runs.append(current)
        current.extend([module] if module.has_hooks() else module.basic_operations())
    return runs
