"""Where the scales of blocks lie: shape and dtype of scale_inv per mode and copy (docs/numerics.md, B1, M1, T1).

A tensor ``[..., K]`` is seen as ``[M, K]``, a vector as one row. A block is ``down x along`` elements of it, those at
the edges are shorter, and the factors of all blocks form a grid ``[ceil(M / down), ceil(K / along)]``. A scale_inv
buffer holds the grid, perhaps transposed, and padding that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage
    from te_hal.schema.storage_kind import StorageKind


class Block(NamedTuple):
    """Elements of ``[M, K]`` that share a factor: ``down`` rows by ``along`` columns."""

    down: int
    along: int

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the grid of blocks over ``[rows, cols]``."""
        return -(-rows // self.down), -(-cols // self.along)


@dataclass(frozen=True, slots=True)
class _Scales:
    """One copy's: its blocks, whether the buffer holds the grid transposed, and the multiples it is padded to."""

    block: Block
    turned: bool
    padded_to: tuple[int, int]


#: (rowwise copy, columnwise copy) per mode, as Transformer Engine lays them out.
_LAYOUTS = {
    ScalingMode.BLOCK_1X128: (_Scales(Block(1, 128), True, (1, 4)), _Scales(Block(128, 1), False, (1, 4))),
    ScalingMode.BLOCK_128X128: (_Scales(Block(128, 128), False, (1, 4)), _Scales(Block(128, 128), True, (1, 4))),
    ScalingMode.MXFP8: (_Scales(Block(1, 32), False, (128, 4)), _Scales(Block(32, 1), False, (4, 128))),
    ScalingMode.MTFP8_1X128: (_Scales(Block(1, 128), False, (1, 1)), _Scales(Block(128, 1), False, (1, 1))),
    ScalingMode.MTFP8_128X128: (_Scales(Block(128, 128), False, (1, 1)), _Scales(Block(128, 128), False, (1, 1))),
}

#: Moore Threads' modes: scales by a rule of their own, and columnwise copies in rowwise order.
MTFP8_MODES = frozenset({ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128})

#: Transformer Engine's modes in which every block has a factor of its own, found from its own amax.
BLOCK_MODES = frozenset(_LAYOUTS) - MTFP8_MODES

#: Modes in which both copies hold the same codes and factors.
SQUARE_MODES = frozenset({ScalingMode.BLOCK_128X128, ScalingMode.MTFP8_128X128})


def scale_dtype(mode: ScalingMode) -> torch.dtype:
    """Of scale_inv: uint8 (E8M0 codes) for MXFP8, else torch.float32."""
    return torch.uint8 if mode is ScalingMode.MXFP8 else torch.float32


def block_of(mode: ScalingMode, *, rowwise: bool) -> Block:
    """Which elements share a factor in a copy; for modes with blocks."""
    return _LAYOUTS[mode][0 if rowwise else 1].block


def scale_shape(mode: ScalingMode, shape: tuple[int, ...], *, rowwise: bool) -> tuple[int, ...]:
    """Shape of the scale_inv of a copy of a tensor of ``shape``, padding included; ``(1,)`` for per-tensor scaling.

    Raises:
        UnsupportedError: a mode whose scales have no layout yet.
    """
    if mode is ScalingMode.TENSOR:
        return (1,)
    if mode not in _LAYOUTS:
        raise no_layout(repr(mode.value))
    scales = _LAYOUTS[mode][0 if rowwise else 1]
    grid = scales.block.grid(*rows_and_cols(shape))
    outer, inner = grid[::-1] if scales.turned else grid
    return _padded(outer, scales.padded_to[0]), _padded(inner, scales.padded_to[1])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def scale_grid(scale_inv: torch.Tensor, mode: ScalingMode, shape: tuple[int, ...], *, rowwise: bool) -> torch.Tensor:
    """A view of the scale_inv of a copy: the grid ``[ceil(M / down), ceil(K / along)]``, without its padding.

    Args:
        scale_inv: of the shape that :func:`scale_shape` gives.
        mode: one with blocks.
        shape: of the tensor.
        rowwise: which copy.
    """
    scales = _LAYOUTS[mode][0 if rowwise else 1]
    down, along = scales.block.grid(*rows_and_cols(shape))
    grid = scale_inv.t() if scales.turned else scale_inv
    return grid[:down, :along]


class BlockCopy(NamedTuple):
    """One copy of a storage with blocks, as whoever reads or writes it needs it.

    Attributes:
        codes: uint8; ``[..., K]``, or ``[K, ...]`` where ``turned``.
        rowwise: which copy it is.
        turned: whether the codes lie transposed.
        block: which elements share a factor.
        grid: their factors, as :func:`scale_grid` gives them.
    """

    codes: torch.Tensor
    rowwise: bool
    turned: bool
    block: Block
    grid: torch.Tensor


def block_copy(storage: QuantizedStorage, *, rowwise: bool) -> BlockCopy:
    """That copy of a storage with blocks; the other one where it is the only one there is (B5)."""
    kind = storage.kind
    rowwise = kind.rowwise if rowwise else not kind.columnwise
    row, row_scale_inv, column, column_scale_inv = storage.tensors()
    codes, scale_inv = (row, row_scale_inv) if rowwise else (column, column_scale_inv)
    turned = not rowwise and kind.order is ColumnwiseOrder.TRANSPOSED and len(storage.shape) > 1
    grid = scale_grid(scale_inv, kind.mode, storage.shape, rowwise=rowwise)  # type: ignore[arg-type] # comes with its codes
    return BlockCopy(codes, rowwise, turned, block_of(kind.mode, rowwise=rowwise), grid)  # type: ignore[arg-type] # there is a copy


def order_of(mode: ScalingMode, order: ColumnwiseOrder) -> ColumnwiseOrder:
    """The memory order of a columnwise copy for a backend that reads ``order``: MTFP8 has but one (T1)."""
    return ColumnwiseOrder.SAME if mode in MTFP8_MODES else order


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """``[..., K]`` as ``(M, K)``: a vector is one row, a scalar one element."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if shape else 1)


def no_layout(got: str | StorageKind) -> UnsupportedError:
    """The error for a scaling mode that storages cannot have yet."""
    return UnsupportedError(
        "QuantizedStorage",
        got=f"scaling mode {got}, which is not built yet",
        accepted=", ".join(repr(mode.value) for mode in ScalingMode if mode is ScalingMode.TENSOR or mode in _LAYOUTS),
        todo="choose one of these modes",
    )
