"""QuantizedStorage: the plain object that carries a quantized operand between modules, ops and backends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode

if TYPE_CHECKING:
    import torch


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
        """The one kind with these properties."""
        key = (fmt, mode, rowwise, columnwise, order)
        kind = cls._known.get(key)
        if kind is None:
            kind = cls()
            kind.format, kind.mode, kind.order = fmt, mode, order
            kind.rowwise, kind.columnwise = rowwise, columnwise
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


class QuantizedStorage:
    """Quantized data with its scales. Which copies exist is fixed at construction; their bytes may change.

    Attributes:
        format: element format of the codes.
        mode: how many elements share a scale.
        shape: logical shape, a tuple of ints, the same for both copies.
        dtype: nominal dtype, the one ``dequantize`` returns unless told otherwise.
        rowwise_data: uint8 codes, shape ``shape``, or None.
        rowwise_scale_inv: fp32 factor back to real values; ``[1]`` for per-tensor scaling.
        columnwise_data: uint8 codes, ``[K, ...]`` or ``shape`` by ``columnwise_order``, or None.
        columnwise_scale_inv: the factor of that copy.
        columnwise_order: memory order of ``columnwise_data``.
        kind: interned summary that dispatch keys on.
        device: where the data lies.
    """

    __slots__ = (
        "columnwise_data",
        "columnwise_order",
        "columnwise_scale_inv",
        "device",
        "dtype",
        "format",
        "kind",
        "mode",
        "rowwise_data",
        "rowwise_scale_inv",
        "shape",
    )

    def __init__(
        self,
        *,
        format: ElementFormat,
        mode: ScalingMode,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rowwise_data: torch.Tensor | None = None,
        rowwise_scale_inv: torch.Tensor | None = None,
        columnwise_data: torch.Tensor | None = None,
        columnwise_scale_inv: torch.Tensor | None = None,
        columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    ) -> None:
        data = rowwise_data if rowwise_data is not None else columnwise_data
        if data is None:
            msg = "QuantizedStorage: needs rowwise_data, columnwise_data or both"
            raise ValueError(msg)
        self.format = format
        self.mode = mode
        self.shape = tuple(shape)
        self.dtype = dtype
        self.rowwise_data = rowwise_data
        self.rowwise_scale_inv = rowwise_scale_inv
        self.columnwise_data = columnwise_data
        self.columnwise_scale_inv = columnwise_scale_inv
        self.columnwise_order = columnwise_order
        self.device = data.device
        self.kind = StorageKind.of(
            format,
            mode,
            rowwise=rowwise_data is not None,
            columnwise=columnwise_data is not None,
            order=columnwise_order,
        )

    @classmethod
    def of_kind(
        cls,
        kind: StorageKind,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> QuantizedStorage:
        """A storage of a known kind, from buffers that fit it, in the order of :meth:`tensors`.

        Nothing is checked: for kernels, which make one with every call.
        """
        storage = cls.__new__(cls)
        storage.kind, storage.format, storage.mode, storage.columnwise_order = kind, kind.format, kind.mode, kind.order
        storage.shape, storage.dtype, storage.device = shape, dtype, device
        (
            storage.rowwise_data,
            storage.rowwise_scale_inv,
            storage.columnwise_data,
            storage.columnwise_scale_inv,
        ) = tensors
        return storage

    def __repr__(self) -> str:
        return f"QuantizedStorage({self.kind!r}, shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    def nbytes(self) -> int:
        """Bytes held by all copies and scales together."""
        return sum(t.numel() * t.element_size() for t in self.tensors() if t is not None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The four buffers in the order that :meth:`with_tensors` takes them."""
        return (self.rowwise_data, self.rowwise_scale_inv, self.columnwise_data, self.columnwise_scale_inv)

    def with_tensors(
        self, tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype | None = None
    ) -> QuantizedStorage:
        """The same description over other buffers, in the order of :meth:`tensors`; shares, never copies."""
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv = tensors
        return QuantizedStorage(
            format=self.format,
            mode=self.mode,
            shape=self.shape,
            dtype=dtype or self.dtype,
            rowwise_data=rowwise_data,
            rowwise_scale_inv=rowwise_scale_inv,
            columnwise_data=columnwise_data,
            columnwise_scale_inv=columnwise_scale_inv,
            columnwise_order=self.columnwise_order,
        )

    def keep(self, *, rowwise: bool, columnwise: bool) -> QuantizedStorage:
        """A storage over the wanted copies only; the others' memory is free once nobody else holds it.

        Raises:
            ValueError: a wanted copy is not there, or nothing is wanted.
        """
        for wanted, data, name in (
            (rowwise, self.rowwise_data, "rowwise"),
            (columnwise, self.columnwise_data, "columnwise"),
        ):
            if wanted and data is None:
                msg = f"QuantizedStorage.keep: no {name} copy in {self.kind!r}"
                raise ValueError(msg)
        row, row_scale, col, col_scale = self.tensors()
        return self.with_tensors(
            (
                row if rowwise else None,
                row_scale if rowwise else None,
                col if columnwise else None,
                col_scale if columnwise else None,
            )
        )
