"""HybridStorage: an operand whose two directions are quantized each by a quantizer of its own."""

from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import te_hal.ops
from te_hal.quantization.copies import follow, with_copies
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ColumnwiseOrder
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.quantization.linear_calls import Copies, HybridCopies

    #: What one direction became: codes, or the tensor itself from a quantizer that makes none.
    Part = QuantizedStorage | torch.Tensor

_BUFFERS = 4  #: of a QuantizedStorage


class HybridMode(enum.Enum):
    """Stands where other storages have their scaling mode."""

    HYBRID = "hybrid"


class HybridKind(NamedTuple):
    """What a HybridStorage is, without the data; equal ones are one object.

    Attributes:
        rowwise, columnwise: which parts are there.
        parts: kinds of the parts, "plain" of one that was not quantized.
    """

    rowwise: bool
    columnwise: bool
    parts: tuple[object, object]

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles give the one object: kinds are compared by identity."""
        return _kind, self.parts

    def __repr__(self) -> str:
        return f"hybrid({self.parts[0]!r}, {self.parts[1]!r})"


@functools.cache
def _kind(row: object, column: object) -> HybridKind:
    return HybridKind(row is not None, column is not None, (row, column))


class HybridStorage:
    """Two parts of one tensor, for QuantizedTensor and modules in the place of a QuantizedStorage.

    Args:
        rowwise: what the product that reads rows gets (fprop; of a gradient dgrad).
        columnwise: what the other product gets (dgrad of a weight, wgrad); either may be None, not both.
        shape: logical shape.
        dtype: nominal dtype.

    Raises:
        ArgumentError: no part.
    """

    __slots__ = ("columnwise", "device", "dtype", "kind", "rowwise", "shape")

    mode = HybridMode.HYBRID
    format = None
    columnwise_order = ColumnwiseOrder.TRANSPOSED  # asked for by whoever refuses it next
    layout = torch.strided

    def __init__(
        self, rowwise: Part | None, columnwise: Part | None, *, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        part = rowwise if rowwise is not None else columnwise
        if part is None:
            raise ArgumentError(
                "HybridStorage", got="no part", accepted="a rowwise or a columnwise one", todo="keep one of them"
            )
        self.rowwise, self.columnwise = rowwise, columnwise
        self.shape, self.dtype, self.device = tuple(shape), dtype, part.device
        self.kind = _kind(_kind_of(rowwise), _kind_of(columnwise))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those that are there."""
        return tuple(part for part in (self.rowwise, self.columnwise) if part is not None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Four buffers a part; a plain part is the first of its four."""
        return (*_buffers(self.rowwise), *_buffers(self.columnwise))

    def with_tensors(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype | None = None) -> HybridStorage:
        """The same description over other buffers, in the order of :meth:`tensors`.

        Args:
            tensors: buffers of the same shapes.
            dtype: nominal dtype; None: this one's.
        """
        nominal = dtype or self.dtype
        made = [
            _with_buffers(part, tuple(tensors[start : start + _BUFFERS]), nominal)
            for part, start in ((self.rowwise, 0), (self.columnwise, _BUFFERS))
        ]
        return HybridStorage(made[0], made[1], shape=self.shape, dtype=nominal)

    def keep(self, *, rowwise: bool, columnwise: bool) -> HybridStorage:
        """A storage over the wanted parts.

        Raises:
            ArgumentError: none is wanted.
        """
        kept = self.rowwise if rowwise else None, self.columnwise if columnwise else None
        return HybridStorage(*kept, shape=self.shape, dtype=self.dtype)

    def read_by(self, copies: HybridCopies, order: ColumnwiseOrder) -> HybridStorage | None:
        """The parts that products read, each with just the copies that they read.

        Args:
            copies: of each part; None of one that nobody reads.
            order: memory order of columnwise copies.

        Returns:
            Shares what is there; a copy that follows from another is made. None where one is missing that does not.
        """
        pairs = ((self.rowwise, copies.rowwise), (self.columnwise, copies.columnwise))
        if not all(_serves(part, made, order) for part, made in pairs):
            return None
        made = [_read(part, wanted, order) for part, wanted in pairs]
        return HybridStorage(made[0], made[1], shape=self.shape, dtype=self.dtype)

    def view(self, shape: tuple[int, ...]) -> HybridStorage:
        """Both parts under another logical shape; shares, never copies.

        Raises:
            ArgumentError: a part whose codes cannot follow.
        """
        made = [None if part is None else part.view(shape) for part in (self.rowwise, self.columnwise)]
        whole = next(tuple(part.shape) for part in made if part is not None)
        return HybridStorage(made[0], made[1], shape=whole, dtype=self.dtype)

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What the rowwise part stands for, or the columnwise one where that is alone; in ``dtype``, a new tensor."""
        part = self.parts[0]
        if isinstance(part, torch.Tensor):
            return part.to(dtype or self.dtype, copy=True)
        plain: torch.Tensor = te_hal.ops.dequantize(part, out_dtype=dtype or self.dtype)
        return plain


def values_of(storage: Any, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ANN401 - of any class
    """The plain values of a QuantizedStorage, HybridStorage or IdentityStorage, in ``dtype`` or the nominal dtype."""
    if isinstance(storage, QuantizedStorage):
        plain: torch.Tensor = te_hal.ops.dequantize(storage, out_dtype=dtype)
    else:
        plain = storage.dequantized(dtype)
    return plain


def _serves(part: Part | None, made: Copies | None, order: ColumnwiseOrder) -> bool:
    if made is None or isinstance(part, torch.Tensor):
        return True
    return part is not None and follow(part, rowwise=made.rowwise, columnwise=made.columnwise, order=order)


def _read(part: Part | None, made: Copies | None, order: ColumnwiseOrder) -> Part | None:
    if made is None or part is None or isinstance(part, torch.Tensor):
        return None if made is None else part
    whole = with_copies(part, rowwise=made.rowwise, columnwise=made.columnwise, order=order)
    return whole.keep(rowwise=made.rowwise, columnwise=made.columnwise)


def _kind_of(part: Part | None) -> object:
    if part is None:
        return None
    return part.kind if isinstance(part, QuantizedStorage) else "plain"


def _buffers(part: Part | None) -> tuple[torch.Tensor | None, ...]:
    if isinstance(part, QuantizedStorage):
        return part.tensors()
    return (part, None, None, None)


def _with_buffers(part: Part | None, buffers: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> Part | None:
    if isinstance(part, QuantizedStorage):
        return part.with_tensors(buffers, dtype)
    plain = buffers[0]
    return None if plain is None else plain.to(dtype)
