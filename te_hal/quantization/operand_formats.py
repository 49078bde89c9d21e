"""OperandFormat: what the operand of one role becomes, and Formats: all operands of a linear layer's products."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.quantization.linear_calls import Copies
    from te_hal.recipe import Recipe
    from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode


class OperandFormat:
    """Element format, scaling mode, and where the scale comes from. Interned: equal ones are one object.

    Attributes:
        format: of the codes.
        mode: how many elements share a scale.
        delayed: the scale is given and amax is recorded on the way; else the operand's own amax gives it.
    """

    __slots__ = ("delayed", "format", "mode")

    _known: dict[tuple[object, ...], OperandFormat] = {}  # noqa: RUF012 - the intern table

    format: ElementFormat
    mode: ScalingMode
    delayed: bool

    @classmethod
    def of(cls, fmt: ElementFormat, mode: ScalingMode, *, delayed: bool = False) -> OperandFormat:
        """The one object with these properties."""
        key = (fmt.name, mode, delayed)
        known = cls._known.get(key)
        if known is None:
            known = cls()
            known.format, known.mode, known.delayed = fmt, mode, delayed
            known = cls._known.setdefault(key, known)
        return known

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles give the interned object: plans compare by identity."""
        return _interned, (self.format, self.mode, self.delayed)

    def __repr__(self) -> str:
        return f"{self.format.name}/{self.mode.value}{'/delayed' if self.delayed else ''}"

    def kind(self, copies: Copies, order: ColumnwiseOrder) -> StorageKind:
        """What the operand with these copies is to a capability answer, for a backend that reads ``order``."""
        return StorageKind.of(self.format, self.mode, rowwise=copies.rowwise, columnwise=copies.columnwise, order=order)


def _interned(fmt: ElementFormat, mode: ScalingMode, delayed: bool) -> OperandFormat:
    return OperandFormat.of(fmt, mode, delayed=delayed)


class HybridFormat(NamedTuple):
    """What an operand becomes by a HybridQuantizer; None for a part that stays plain.

    Attributes:
        rowwise: for the first of the two products that read it, in the order fprop, dgrad, wgrad.
        columnwise: for the other one.
        chained: the columnwise part is made of what the rowwise one stands for.
    """

    rowwise: OperandFormat | None
    columnwise: OperandFormat | None
    chained: bool


#: The two products that read an operand, and as which of theirs: the rowwise part's, then the columnwise one's.
READERS = {
    "input": (("fprop", "a"), ("wgrad", "b")),
    "weight": (("fprop", "b"), ("dgrad", "b")),
    "grad_output": (("dgrad", "a"), ("wgrad", "a")),
}


class Formats(NamedTuple):
    """What the operands of a linear layer become, by role; None for one that its products take unquantized.

    Attributes:
        hybrids: roles that become two parts, with what these are; their own fields are None.
        backward_override: None; or what dgrad and wgrad multiply in place of codes: the operands as they were before
            the cast ("high_precision"), or what the forward's codes stand for ("dequantized"); docs/numerics.md, F6.
    """

    input: OperandFormat | None
    weight: OperandFormat | None
    output: OperandFormat | None
    grad_output: OperandFormat | None
    grad_input: OperandFormat | None
    backward_override: str | None = None
    hybrids: tuple[tuple[str, HybridFormat], ...] = ()

    @property
    def operands(self) -> tuple[OperandFormat | None, ...]:
        """The formats alone, those of parts included."""
        parts = [part for _, hybrid in self.hybrids for part in (hybrid.rowwise, hybrid.columnwise)]
        return (*self[:5], *parts)

    def hybrid(self, role: str) -> HybridFormat | None:
        """The two formats of an operand that has two."""
        return next((hybrid for name, hybrid in self.hybrids if name == role), None) if self.hybrids else None

    def read_by(self, layout: str, role: str) -> OperandFormat | None:
        """What a product reads of an operand; None where that is a plain tensor."""
        hybrid = self.hybrid(role)
        if hybrid is not None:
            return hybrid.rowwise if layout == READERS[role][0][0] else hybrid.columnwise
        of: OperandFormat | None = getattr(self, role)
        return of if self.backward_override is None or layout == "fprop" else None

    def with_override(self, override: str | None) -> Formats:
        """The same in the forward, with a backward that multiplies plain tensors."""
        if override is None:
            return self
        return self._replace(grad_output=None, grad_input=None, backward_override=override)


class _Latest:
    """The recipe that was asked about last, its version then, and the answer: modules ask with every call."""

    known: tuple[Recipe, int, Formats] | None = None


def recipe_formats(recipe: Recipe) -> Formats:
    """Formats under a recipe whose quantizers follow from its fields."""
    known = _Latest.known
    if known is not None and known[0] is recipe and known[1] == recipe.version:
        return known[2]
    formats = _formats(recipe)
    _Latest.known = (recipe, recipe.version, formats)
    return formats


def _formats(recipe: Recipe) -> Formats:
    forward, backward = recipe.element_format(forward=True), recipe.element_format(forward=False)
    delayed, mode = recipe.delayed(), recipe.mode_of
    formats = Formats(
        OperandFormat.of(forward, mode("input"), delayed=delayed),
        OperandFormat.of(forward, mode("weight"), delayed=delayed),
        OperandFormat.of(forward, mode("output"), delayed=delayed),
        OperandFormat.of(backward, mode("grad_output"), delayed=delayed),
        OperandFormat.of(backward, mode("grad_input"), delayed=delayed),
    )
    return formats.with_override(override_of(recipe))


def override_of(recipe: Recipe) -> str | None:
    """A recipe's ``backward_override``; None where it has no such field."""
    override: str | None = getattr(recipe, "backward_override", None)
    return override
