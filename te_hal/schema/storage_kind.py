"""StorageKind: what a capability answer may depend on of quantized data, without the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES, packed_shape

if TYPE_CHECKING:
    import enum
    from typing import TypeVar

    Choice = TypeVar("Choice", bound=enum.Enum)


class StorageKind:
    """What a capability answer may depend on, without the data. Interned: equal kinds are one object."""

    __slots__ = ("columnwise", "format", "mode", "order", "rowwise")

    _known: dict[tuple[object, ...], StorageKind] = {}  # noqa: RUF012 - the intern table

    format: ElementFormat
    mode: ScalingMode
    rowwise: bool
    columnwise: bool
    order: ColumnwiseOrder

    @classmethod
    def of(
        cls, fmt: ElementFormat, mode: ScalingMode, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
    ) -> StorageKind:
        """The one kind with these properties; mode and order may be given as their strings.

        Raises:
            ArgumentError: no such mode or order.
        """
        # A string finds the kind of the member that it equals; only members are stored.
        kind = cls._known.get((fmt, mode, rowwise, columnwise, order))
        if kind is None:
            kind = cls()
            kind.format, kind.mode, kind.order = fmt, _member(ScalingMode, mode), _member(ColumnwiseOrder, order)
            kind.rowwise, kind.columnwise = bool(rowwise), bool(columnwise)
            key = (kind.format, kind.mode, kind.rowwise, kind.columnwise, kind.order)
            kind = cls._known.setdefault(key, kind)
        return kind

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles give the interned object: dispatch compares kinds by identity."""
        return _interned, (self.format, self.mode, self.rowwise, self.columnwise, self.order)

    def __repr__(self) -> str:
        copies = "+".join(n for n, on in (("rowwise", self.rowwise), ("columnwise", self.columnwise)) if on)
        return f"{self.format.name}/{self.mode.value}/{copies or 'empty'}"


def _interned(
    fmt: ElementFormat, mode: ScalingMode, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> StorageKind:
    return StorageKind.of(fmt, mode, rowwise=rowwise, columnwise=columnwise, order=order)


def _member(choices: type[Choice], value: object) -> Choice:
    try:
        return choices(value)
    except ValueError:
        raise ArgumentError(
            f"QuantizedStorage: {choices.__name__}",
            got=repr(value),
            accepted=", ".join(repr(choice.value) for choice in choices),
            todo="correct the argument",
        ) from None


def codes_shape(kind: StorageKind, shape: tuple[int, ...], *, rowwise: bool) -> tuple[int, ...]:
    """How the codes of a copy of ``[..., K]`` lie in memory: one a byte, or two in E2M1."""
    if kind.mode in NVFP4_MODES:
        return packed_shape(shape, rowwise=rowwise)
    return shape if rowwise else stored_shape(shape, kind.order)


def stored_shape(shape: tuple[int, ...], order: ColumnwiseOrder) -> tuple[int, ...]:
    """How the codes of a columnwise copy of ``[..., K]`` lie in memory: ``[K, ...]``, or unchanged."""
    return (*shape[-1:], *shape[:-1]) if order == ColumnwiseOrder.TRANSPOSED else shape
