"""QuantizedStorage: the plain object that carries a quantized operand between modules, ops and backends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import rows_and_cols, scale_dtype, scale_shape
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode, element_format
from te_hal.schema.storage_checks import check_buffers, no_copy
from te_hal.schema.storage_kind import StorageKind, codes_shape, stored_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device | str | None], torch.Tensor]
    Buffers = tuple[torch.Tensor | None, ...]


__all__ = ["QuantizedStorage", "StorageKind"]


class QuantizedStorage:
    """Quantized data with its scales. Which copies exist is fixed at construction; their bytes may change.

    The constructor checks what it is given; :meth:`of_kind` and :meth:`empty` are for code that makes a storage with
    every call.

    Raises:
        ArgumentError: no copy at all, a copy without its ``scale_inv`` or the reverse, a buffer of another dtype,
            shape or device.
        ArgumentTypeError: a buffer is no tensor.

    Attributes:
        format: element format of the codes.
        mode: how many elements share a scale.
        shape: logical shape, a tuple of ints, the same for both copies.
        dtype: nominal dtype, the one ``dequantize`` returns unless told otherwise.
        rowwise_data: uint8 codes, shape ``shape`` (E2M1: ``[..., K / 2]``), or None.
        rowwise_scale_inv: factors back to real values: fp32 ``[1]`` for per-tensor scaling; else one per block, fp32
            or E8M0 codes (uint8), laid out as te_hal.schema.block_scales has it; of NVFP4 both levels
            (te_hal.schema.nvfp4_layout).
        columnwise_data: uint8 codes, ``[K, ...]`` or ``shape`` by ``columnwise_order`` (E2M1: ``[K, M / 2]``), or
            None.
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

    #: As of a dense tensor, which its buffers are: dispatch asks every operand.
    layout = torch.strided

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
        self.kind = StorageKind.of(
            element_format(format, "QuantizedStorage: format"),
            mode,
            rowwise=rowwise_data is not None,
            columnwise=columnwise_data is not None,
            order=columnwise_order,
        )
        self.format, self.mode, self.columnwise_order = self.kind.format, self.kind.mode, self.kind.order
        self.shape = tuple(shape)
        self.dtype = dtype
        self.rowwise_data = rowwise_data
        self.rowwise_scale_inv = rowwise_scale_inv
        self.columnwise_data = columnwise_data
        self.columnwise_scale_inv = columnwise_scale_inv
        check_buffers(self)
        self.device = (rowwise_data if rowwise_data is not None else columnwise_data).device  # type: ignore[union-attr] # checked

    @classmethod
    def of_kind(
        cls,
        kind: StorageKind,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> QuantizedStorage:
        """A storage of a known kind, from buffers that fit it, in the order of :meth:`tensors`. Nothing is checked."""
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

    @classmethod
    def empty(
        cls,
        kind: StorageKind,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
        allocate: Allocate | None = None,
    ) -> QuantizedStorage:
        """A storage whose codes and scale_inv hold no defined values.

        With per-tensor scaling both copies share one scale_inv.

        Args:
            kind: format, scaling mode and copies.
            shape: logical shape.
            dtype: nominal dtype.
            device: None means torch's default device.
            allocate: makes a tensor of a shape and dtype on a device; None: torch.empty.

        Raises:
            ArgumentError: scales of blocks without a copy that they belong to.
        """
        make = _allocate if allocate is None else allocate
        if kind.mode is not ScalingMode.TENSOR:
            return cls.of_kind(kind, shape, dtype, *_empty_blocks(kind, shape, device, make))
        scale_inv = make((1,), torch.float32, device)
        row = row_scale_inv = column = column_scale_inv = None
        if kind.rowwise:
            row, row_scale_inv = make(shape, torch.uint8, device), scale_inv
        if kind.columnwise:
            column, column_scale_inv = make(stored_shape(shape, kind.order), torch.uint8, device), scale_inv
        buffers = (row, row_scale_inv, column, column_scale_inv)
        return cls.of_kind(kind, shape, dtype, scale_inv.device, buffers)

    def __repr__(self) -> str:
        return f"QuantizedStorage({self.kind!r}, shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    def tensors(self) -> Buffers:
        """The four buffers in the order that :meth:`with_tensors` takes them."""
        return (self.rowwise_data, self.rowwise_scale_inv, self.columnwise_data, self.columnwise_scale_inv)

    def with_tensors(self, tensors: Buffers, dtype: torch.dtype | None = None) -> QuantizedStorage:
        """The same description over other buffers, in the order of :meth:`tensors`; shares, never copies.

        Args:
            tensors: buffers of the same shapes, all on one device; copies may be left out. Not checked.
            dtype: nominal dtype; None: this one's.

        Raises:
            ArgumentError: no copy is left.
        """
        row, _, column, _ = tensors
        data = row if row is not None else column
        if data is None:
            raise no_copy()
        kind = self.kind
        if (row is None) is kind.rowwise or (column is None) is kind.columnwise:
            kind = StorageKind.of(
                self.format, self.mode, rowwise=row is not None, columnwise=column is not None, order=kind.order
            )
        return QuantizedStorage.of_kind(kind, self.shape, dtype or self.dtype, data.device, tensors)

    def keep(self, *, rowwise: bool, columnwise: bool) -> QuantizedStorage:
        """A storage over the wanted copies only; the others' memory is free once nobody else holds it.

        This very storage where it has just these.

        Raises:
            ArgumentError: a wanted copy is not there, or nothing is wanted.
        """
        kind = self.kind
        if rowwise is kind.rowwise and columnwise is kind.columnwise:
            return self
        if (rowwise and not kind.rowwise) or (columnwise and not kind.columnwise):
            raise ArgumentError(
                "QuantizedStorage.keep",
                got=f"rowwise={rowwise}, columnwise={columnwise} of {kind!r}",
                accepted="copies that are there",
                todo="make the missing copy when quantizing",
            )
        row, row_scale_inv, column, column_scale_inv = self.tensors()
        kept = (row, row_scale_inv) if rowwise else (None, None)
        return self.with_tensors((*kept, *((column, column_scale_inv) if columnwise else (None, None))))

    def copy_to_read(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The copy that holds every value: the rowwise one where there is one, else the columnwise one.

        Returns:
            Its codes, its scale_inv, and whether the codes lie as ``[K, ...]`` instead of ``[..., K]``.
        """
        if self.rowwise_data is not None:
            return self.rowwise_data, self.rowwise_scale_inv, False  # type: ignore[return-value] # comes with its data
        turned = self.kind.order is ColumnwiseOrder.TRANSPOSED and len(self.shape) > 1
        return self.columnwise_data, self.columnwise_scale_inv, turned  # type: ignore[return-value] # there is a copy

    def view(self, shape: Sequence[int]) -> QuantizedStorage:
        """The same codes under another logical shape; shares, never copies. This very storage if the shape is its own.

        Args:
            shape: of as many elements; one size may be -1 where the others tell it.

        Returns:
            A storage with the copies that can follow: a transposed one does where the last dimension stays, and is
            left out otherwise. Scales of blocks belong to rows and columns: there the last dimension must stay.

        Raises:
            ArgumentError: another number of elements, no copy that can follow, or blocks that would change.
        """
        wanted = self._whole_shape(tuple(shape))
        if wanted == self.shape:
            return self
        if self.mode is not ScalingMode.TENSOR and rows_and_cols(wanted) != rows_and_cols(self.shape):
            raise self._no_view(wanted, "shapes with the same last dimension: its scales belong to blocks")
        row, row_scale_inv, column, column_scale_inv = self.tensors()
        if column is not None:
            stays = self.kind.order is ColumnwiseOrder.SAME or wanted[-1:] == self.shape[-1:]
            column = column.view(codes_shape(self.kind, wanted, rowwise=False)) if stays else None
        if row is None and column is None:
            raise self._no_view(wanted, "shapes with the same last dimension")
        row = None if row is None else row.view(codes_shape(self.kind, wanted, rowwise=True))
        column_scale_inv = None if column is None else column_scale_inv
        made = self.with_tensors((row, row_scale_inv, column, column_scale_inv))
        made.shape = wanted
        return made

    def _whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` with its -1 worked out."""
        numel, known = self.numel(), math.prod(size for size in shape if size != -1)
        whole = tuple(numel // known if size == -1 else size for size in shape) if known else shape
        if shape.count(-1) > 1 or min(whole, default=0) < 0 or math.prod(whole) != numel:
            raise self._no_view(shape, f"shapes of {numel} elements")
        return whole

    def _no_view(self, shape: tuple[int, ...], accepted: str) -> ArgumentError:
        return ArgumentError(
            "QuantizedStorage.view", got=f"{shape} for {self!r}", accepted=accepted, todo="dequantize it first"
        )


def _empty_blocks(
    kind: StorageKind, shape: tuple[int, ...], device: torch.device | str | None, make: Allocate
) -> tuple[torch.device, Buffers]:
    """Device and buffers of an empty storage whose copies have scales of their own."""
    if not (kind.rowwise or kind.columnwise):
        raise no_copy()
    buffers: list[torch.Tensor | None] = [None] * 4
    for place, wanted in ((0, kind.rowwise), (2, kind.columnwise)):
        if wanted:
            factors = scale_shape(kind.mode, shape, rowwise=place == 0)
            buffers[place] = data = make(codes_shape(kind, shape, rowwise=place == 0), torch.uint8, device)
            buffers[place + 1] = make(factors, scale_dtype(kind.mode), device)
    return data.device, tuple(buffers)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
