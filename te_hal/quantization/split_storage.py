"""Parts of quantized data along its first dimension, where codes and scales of a part stand alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.block_scales import block_copy, block_of, rows_and_cols
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK, NVFP4_MODES, set_tensor_amax, tensor_amax
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def split_storage(storage: QuantizedStorage, sizes: Sequence[int]) -> list[QuantizedStorage] | None:
    """Consecutive parts of these sizes along dimension 0; codes are shared, scales of blocks copied.

    A part has the copies that all parts can have: those in rowwise order, with blocks that no boundary cuts.

    Returns:
        The parts; None where none could have a copy, or the tensor has but one dimension.
    """
    shape = storage.shape
    if len(shape) < 2:  # noqa: PLR2004 - rows and columns
        return None
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    rows_of_one = rows_and_cols(shape[1:])[0]
    boundaries = [start * rows_of_one for start in (*starts, sum(sizes))]
    rowwise = storage.kind.rowwise and _fits(storage.mode, boundaries, rowwise=True)
    same = storage.columnwise_order is ColumnwiseOrder.SAME
    columnwise = storage.kind.columnwise and same and _fits(storage.mode, boundaries, rowwise=False)
    if not (rowwise or columnwise):
        return None
    return [
        _part(storage, start, size, rows_of_one, rowwise=rowwise, columnwise=columnwise)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _fits(mode: ScalingMode, boundaries: Sequence[int], *, rowwise: bool) -> bool:
    if mode in NVFP4_MODES:  # whose tensors have whole blocks in both directions
        return not any(row % BLOCK for row in boundaries)
    boundaries = boundaries[:-1]
    return mode is ScalingMode.TENSOR or not any(row % block_of(mode, rowwise=rowwise).down for row in boundaries)


def _part(
    storage: QuantizedStorage, start: int, size: int, rows_of_one: int, *, rowwise: bool, columnwise: bool
) -> QuantizedStorage:
    kind = StorageKind.of(
        storage.format, storage.mode, rowwise=rowwise, columnwise=columnwise, order=storage.columnwise_order
    )
    shape = (size, *storage.shape[1:])
    row, row_scales, column, column_scales = storage.tensors()
    codes = [data[start : start + size] if data is not None else None for data in (row, column)]
    scales = [row_scales, column_scales]
    if storage.mode is not ScalingMode.TENSOR:
        made = QuantizedStorage.empty(kind, shape, storage.dtype, storage.device)
        for place, wanted in enumerate((rowwise, columnwise)):
            if wanted:
                scales[place] = _copied_scales(storage, made, start * rows_of_one, rowwise=place == 0)
    of_row = (codes[0], scales[0]) if rowwise else (None, None)
    of_column = (codes[1], scales[1]) if columnwise else (None, None)
    return QuantizedStorage.of_kind(kind, shape, storage.dtype, storage.device, (*of_row, *of_column))


def _copied_scales(
    storage: QuantizedStorage, made: QuantizedStorage, first_row: int, *, rowwise: bool
) -> torch.Tensor | None:
    """scale_inv of ``made``, filled with those of the rows from ``first_row`` on."""
    source, target = block_copy(storage, rowwise=rowwise), block_copy(made, rowwise=rowwise)
    first = first_row // source.block.down
    target.grid.copy_(source.grid[first : first + target.grid.shape[0]])
    given, scale_inv = (
        (storage.rowwise_scale_inv, made.rowwise_scale_inv)
        if rowwise
        else (storage.columnwise_scale_inv, made.columnwise_scale_inv)
    )
    if storage.mode in NVFP4_MODES and given is not None and scale_inv is not None:
        set_tensor_amax(scale_inv, tensor_amax(given))
    return scale_inv
