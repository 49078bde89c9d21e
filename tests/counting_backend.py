"""A backend over cpu_reference's kernels that records every launch, and may insist on the copies its gemm reads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import te_hal.dispatch
from te_hal.dispatch import ANY_DEVICE, Backend, GemmCopies
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import SUPPORTED, Call, Support

if TYPE_CHECKING:
    from collections.abc import Callable

#: Per layout the copies of operands a and b, as a gemm that contracts over the last dimension of each reads them.
COLUMNWISE_IN_BACKWARD = {
    "fprop": GemmCopies("rowwise", "rowwise"),
    "dgrad": GemmCopies("rowwise", "columnwise"),
    "wgrad": GemmCopies("columnwise", "columnwise"),
}


class Launch(NamedTuple):
    """One kernel call."""

    op: str
    layout: str | None
    result: Any


def _bias_grad(grad_output: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """A kernel for an optional op, which would be composed otherwise and leave no trace."""
    return grad_output.float().sum(0).to(out_dtype or grad_output.dtype)


class Counting:
    """Builds and registers the backend; ``launches`` fills up.

    Args:
        name: of the backend.
        reads: copies per layout; None: rowwise everywhere, whatever else is there.
        order: memory order of its columnwise copies.
        says: its answer to capability questions.
    """

    def __init__(
        self,
        name: str = "counting",
        *,
        reads: dict[str, GemmCopies] | None = None,
        order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
        says: Callable[[Call], Support] = lambda _: SUPPORTED,
    ) -> None:
        self.launches: list[Launch] = []
        self.questions: list[Call] = []
        self.reads, self.order, self.says = reads, order, says
        kernels = te_hal.dispatch.backend_for(torch.device("cpu")).kernels
        made = {op: self._recorded(op, kernel) for op, kernel in {**kernels, "bias_grad": _bias_grad}.items()}
        gemm_copies = {} if reads is None else {"gemm_copies": lambda layout, _format, _mode: reads[layout]}
        te_hal.dispatch.register_backend(
            Backend(
                name=name,
                kernels=made,
                serves=frozenset({ANY_DEVICE}),
                supports=self._answer,
                columnwise_order=order,
                **gemm_copies,
            )
        )

    def count(self, op: str, layout: str | None = None) -> int:
        """Launches of an op, of one layout where given."""
        return sum(launch.op == op and layout in (None, launch.layout) for launch in self.launches)

    def _answer(self, call: Call) -> Support:
        self.questions.append(call)
        return self.says(call)

    def _recorded(self, op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def launch(*args: Any, **kwargs: Any) -> Any:
            assert not torch.compiler.is_compiling()
            assert not any(hasattr(value, "quantized_storage") for value in (*args, *kwargs.values()))
            layout = kwargs.get("layout", "fprop") if op == "gemm" else None
            if layout is not None:
                args = self._as_read(layout, *args)
            result = kernel(*args, **kwargs)
            self.launches.append(Launch(op, layout, result))
            return result

        return launch

    def _as_read(self, layout: str, a: Any, b: Any) -> tuple[Any, Any]:
        """The operands with nothing but the copies this gemm reads, so that reading another one fails.

        What is launched must be what the backend was asked about.
        """
        asked = {(q.flags["layout"], q.kinds["a"], q.kinds["b"]) for q in self.questions if q.op == "gemm"}
        assert (layout, *(getattr(x, "kind", x.dtype) for x in (a, b))) in asked
        if self.reads is None:
            return a, b
        return self._only(a, self.reads[layout].a), self._only(b, self.reads[layout].b)

    def _only(self, operand: Any, copy: str) -> Any:
        if not isinstance(operand, QuantizedStorage):
            return operand
        assert copy != "columnwise" or operand.columnwise_order == self.order
        return operand.keep(rowwise=copy == "rowwise", columnwise=copy == "columnwise")
