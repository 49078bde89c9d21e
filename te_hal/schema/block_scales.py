"""Where the scales of blocks lie: shape and dtype of scale_inv per mode and copy (docs/numerics.md, B1, M1, T1, NV1).

A tensor ``[..., K]`` is seen as ``[M, K]``, a vector as one row. A block is ``down x along`` elements of it, those at
the edges are shorter, and the factors of all blocks form a grid ``[ceil(M / down), ceil(K / along)]``. A scale_inv
buffer holds the grid, perhaps transposed, and padding that nobody reads; NVFP4's is flat, with an amax at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import AMAX_BYTES, AMAX_OF_ONE, NVFP4_MODES, check_sizes, set_tensor_amax

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage


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


#: Of 16x16 blocks, too: each row of a square has the scale once.
_NVFP4 = (_Scales(Block(1, 16), False, (128, 4)), _Scales(Block(16, 1), True, (128, 4)))

#: (rowwise copy, columnwise copy) per mode, as Transformer Engine lays them out.
_LAYOUTS = {
    ScalingMode.BLOCK_1X128: (_Scales(Block(1, 128), True, (1, 4)), _Scales(Block(128, 1), False, (1, 4))),
    ScalingMode.BLOCK_128X128: (_Scales(Block(128, 128), False, (1, 4)), _Scales(Block(128, 128), True, (1, 4))),
    ScalingMode.MXFP8: (_Scales(Block(1, 32), False, (128, 4)), _Scales(Block(32, 1), False, (4, 128))),
    ScalingMode.MTFP8_1X128: (_Scales(Block(1, 128), False, (1, 1)), _Scales(Block(128, 1), False, (1, 1))),
    ScalingMode.MTFP8_128X128: (_Scales(Block(128, 128), False, (1, 1)), _Scales(Block(128, 128), False, (1, 1))),
    **dict.fromkeys(NVFP4_MODES, _NVFP4),
}

#: Moore Threads' modes: scales by a rule of their own, and columnwise copies in rowwise order.
MTFP8_MODES = frozenset({ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128})

#: Transformer Engine's modes in which every block has a factor of its own, found from its own amax alone.
BLOCK_MODES = frozenset(_LAYOUTS) - MTFP8_MODES - NVFP4_MODES

#: Modes in which both copies hold the same codes and factors.
SQUARE_MODES = frozenset({ScalingMode.BLOCK_128X128, ScalingMode.MTFP8_128X128, ScalingMode.NVFP4_16X16})


def scale_dtype(mode: ScalingMode) -> torch.dtype:
    """Of scale_inv: uint8 for MXFP8 (E8M0 codes) and NVFP4 (E4M3 codes, and an amax), else torch.float32."""
    return torch.uint8 if mode is ScalingMode.MXFP8 or mode in NVFP4_MODES else torch.float32


def block_of(mode: ScalingMode, *, rowwise: bool) -> Block:
    """Which elements share a factor in a copy; for modes with blocks."""
    return _LAYOUTS[mode][0 if rowwise else 1].block


def scale_shape(mode: ScalingMode, shape: tuple[int, ...], *, rowwise: bool) -> tuple[int, ...]:
    """Shape of the scale_inv of a copy of a tensor of ``shape``, padding included; ``(1,)`` for per-tensor scaling.

    Raises:
        ArgumentError: a shape that NVFP4's blocks do not divide.
    """
    if mode is ScalingMode.TENSOR:
        return (1,)
    scales = _LAYOUTS[mode][0 if rowwise else 1]
    grid = scales.block.grid(*rows_and_cols(shape))
    outer, inner = grid[::-1] if scales.turned else grid
    padded = _padded(outer, scales.padded_to[0]), _padded(inner, scales.padded_to[1])
    if mode not in NVFP4_MODES:
        return padded
    check_sizes(shape)
    return (padded[0] * padded[1] + AMAX_BYTES,)


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
    if mode in NVFP4_MODES:
        scale_inv = _block_scale_codes(scale_inv, down if scales.turned else along)
    grid = scale_inv.t() if scales.turned else scale_inv
    return grid[:down, :along]


def te_scale_inv(storage: QuantizedStorage, *, rowwise: bool) -> torch.Tensor | None:
    """The scales of NVFP4's blocks in a copy as Transformer Engine has them: two-dimensional, with their padding."""
    scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    if scale_inv is None:
        return None
    rows, cols = rows_and_cols(storage.shape)
    return _block_scale_codes(scale_inv, (cols if rowwise else rows) // _NVFP4[0].block.along)


def _block_scale_codes(scale_inv: torch.Tensor, inner: int) -> torch.Tensor:
    """A view of the E4M3 codes in NVFP4's buffer, ``inner`` to a row before padding."""
    return scale_inv[:-AMAX_BYTES].view(-1, max(1, _padded(inner, _NVFP4[0].padded_to[1])))


#: What 1 is written as, in E8M0 and in E4M3.
_ONE_E8M0, _ONE_E4M3 = 127, 0x38


def fill_with_ones(scale_inv: torch.Tensor, mode: ScalingMode) -> None:
    """Have all factors in a scale_inv buffer be 1."""
    if mode in NVFP4_MODES:
        scale_inv.fill_(_ONE_E4M3)
        set_tensor_amax(scale_inv, torch.full((1,), AMAX_OF_ONE, dtype=torch.float32, device=scale_inv.device))
    else:
        scale_inv.fill_(_ONE_E8M0 if mode is ScalingMode.MXFP8 else 1)


class BlockCopy(NamedTuple):
    """One copy of a storage with blocks, as whoever reads or writes it needs it.

    Attributes:
        codes: uint8; ``[..., K]``, or ``[K, ...]`` where ``turned``; NVFP4's are packed.
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
    """The memory order of a columnwise copy for a backend that reads ``order``: MTFP8 and NVFP4 have but one."""
    if mode in NVFP4_MODES:
        return ColumnwiseOrder.TRANSPOSED
    return ColumnwiseOrder.SAME if mode in MTFP8_MODES else order


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    """``[..., K]`` as ``(M, K)``: a vector is one row, a scalar one element."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if shape else 1)
