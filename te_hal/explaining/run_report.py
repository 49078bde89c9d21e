"""te_hal.report: what ran in this process so far, by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.dispatch import Runs, call_counts, registry
from te_hal.explaining.kernel import kernel_name

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class RunRow:
    """Calls of one op that one implementation ran.

    Attributes:
        op: its name.
        backend: whose kernel ran; of a composition, the backend that has none of its own.
        runs: "kernel", "composition" or "fallback".
        kernel: name of the function, or of the composition; empty once its backend is gone.
        calls: how many.
        instead_of: of a fallback, the backend that refused; else empty.
        reason: why it was no kernel of the backend that was asked first, where it was none.
    """

    op: str
    backend: str
    runs: str
    kernel: str
    calls: int
    instead_of: str
    reason: str


@dataclass(frozen=True)
class RunReport:
    """Every implementation that ran, by op."""

    rows: tuple[RunRow, ...]

    @property
    def calls(self) -> int:
        """Of all ops. A composed op and the ops that it is made of each count."""
        return sum(row.calls for row in self.rows)

    @property
    def fallbacks(self) -> int:
        """Calls that another backend took over."""
        return sum(row.calls for row in self.rows if row.runs == Runs.FALLBACK.value)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.rows:
            yield "no op has been called"
            return
        yield f"{self.calls:,} calls of {len({row.op for row in self.rows})} ops, {self.fallbacks:,} by fallbacks"
        cells = [(row.op, f"{row.calls:,}", _implementation(row)) for row in self.rows]
        op, calls = (max(len(cell[column]) for cell in cells) for column in (0, 1))
        for row, cell in zip(self.rows, cells, strict=True):
            yield f"  {cell[0]:<{op}}  {cell[1]:>{calls}}  {cell[2]}"
            if row.reason:
                yield f"  {'':<{op}}  {'':>{calls}}    because {row.instead_of or row.backend} {row.reason}"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"calls": self.calls, "fallbacks": self.fallbacks, "rows": [vars(row) for row in self.rows]}


def _implementation(row: RunRow) -> str:
    kernel = f" ({row.kernel})" if row.kernel else ""
    if row.runs == Runs.COMPOSITION.value:
        return f"{row.backend}, composed{kernel}"
    if row.runs == Runs.FALLBACK.value:
        return f"{row.backend}, a fallback from {row.instead_of}{kernel}"
    return f"{row.backend}{kernel}"


def report() -> RunReport:
    """What ran since the start, or the last ``te_hal.reset()``: op, implementation, calls, fallbacks.

    Every call of a public op and of a kernel that a module's plan keeps counts, in every thread of this process. Calls
    that te_hal makes beside a run do not: the reference of ``te_hal.shadow``, the conformance kit.

    Returns:
        Data; its ``str`` is the text, ``as_dict()`` plain values.
    """
    rows = [
        RunRow(
            op=count.op,
            backend=count.backend,
            runs=count.runs.value,
            kernel=_kernel(count.op, count.runs, count.backend),
            calls=count.calls,
            instead_of=count.instead_of,
            reason=count.reason,
        )
        for count in call_counts()
    ]
    return RunReport(tuple(rows))


def _kernel(op: str, runs: Runs, backend: str) -> str:
    if runs is Runs.COMPOSITION:
        return kernel_name(registry.REGISTRY.compositions[op].function)
    known = registry.tables().backends.get(backend)
    return "" if known is None else kernel_name(known.kernels[op])
