"""What is reported when an op leaves its contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_hal.schema.errors import TeHalError

if TYPE_CHECKING:
    from pathlib import Path


class ShadowWarning(UserWarning):
    """An op left its contract. Comes once per block."""


class ShadowError(TeHalError, ArithmeticError):
    """An op left its contract, and ``on_difference="raise"`` was asked for."""


@dataclass(frozen=True)
class Difference:
    """An op whose result leaves the contract of its schema.

    Attributes:
        op: its name.
        call: operands with dtypes and shapes, and flags.
        case: what ``te-hal conformance --case`` takes for such calls; empty where the kit has none.
        backend: whose result it is.
        reference: what it was held against.
        step: number of the training step, from 1.
        layer: where in the model, as in ``layers.3.mlp of GPT``; None where that is not known.
        direction: "forward" while a module's forward ran, else "backward or outside of modules".
        findings: what differs, a sentence each.
        file: holds the call with its inputs; None where it could not be written.
        file_error: why not.
    """

    op: str
    call: str
    case: str
    backend: str
    reference: str
    step: int
    layer: str | None
    direction: str
    findings: tuple[str, ...]
    file: Path | None = None
    file_error: str = ""

    def __str__(self) -> str:
        place = self.layer or "a layer that is not known"
        return (
            f"{self.op} on backend {self.backend} leaves its contract in step {self.step}, {place}, {self.direction}: "
            f"{'; '.join(self.findings)}; call {self.call}; {self._case()}; {self._what_next()}"
        )

    def _case(self) -> str:
        return f"case {self.case}" if self.case else "the conformance kit has no such case"

    def _what_next(self) -> str:
        if self.file is None:
            return f"its inputs could not be saved: {self.file_error}"
        return f"te-hal replay {self.file}"

    def error(self) -> ShadowError:
        """The same as an error."""
        return ShadowError(
            f"te_hal.shadow: {self.op} on backend {self.backend}",
            got=f"a result outside its contract in step {self.step}, {self.layer or 'unknown layer'}, "
            f"{self.direction}: {'; '.join(self.findings)}; call {self.call}; {self._case()}",
            accepted=f"what {self.reference} gives, as close as the schema of {self.op} says",
            todo=self._what_next(),
        )
