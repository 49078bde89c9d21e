"""Products of operands with a scale per block: as vendors' products by block take them, else dequantized (B5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.ffi.marshalling.block_cast import dequantize_blocks
from te_hal.ffi.marshalling.scaled_matmul import transposed
from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.block_scales import BLOCK_MODES, MTFP8_MODES, block_copy, rows_and_cols, scale_shape
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.ffi.marshalling.plain_matmul import Result
    from te_hal.ffi.native import Native
    from te_hal.schema.support import Kind

    Operand = torch.Tensor | QuantizedStorage


class BlockFactor(NamedTuple):
    """An operand with the contraction last.

    Attributes:
        values: FP8 ``[rows, contraction]``, contiguous.
        scale_inv: fp32 factors, contiguous, laid out as those of a rowwise copy of that shape, padding included.
        mode: blocks of 1x128 along the contraction, or of 128x128.
    """

    values: torch.Tensor
    scale_inv: torch.Tensor
    mode: ScalingMode


class BlockFactors(NamedTuple):
    """Both operands of ``left @ right.T``."""

    left: BlockFactor
    right: BlockFactor


class BlockProduct(NamedTuple):
    """A vendor's product by block: which operands and results it takes, and the product, rounded once."""

    fits: Callable[[BlockFactors, Result], bool]
    multiply: Callable[[BlockFactors, Result], torch.Tensor]


def has_blocks(*kinds: Kind) -> bool:
    """Whether an operand has a scale per block and none above them."""
    return any(isinstance(kind, StorageKind) and kind.mode in BLOCK_MODES | MTFP8_MODES for kind in kinds)


def orient(native: Native, a: QuantizedStorage, b: QuantizedStorage, layout: str) -> BlockFactors | None:
    """Both operands with the contraction last, from the copies whose blocks lie along it; None if one is missing.

    With 128x128 blocks either copy holds the same, so that the other one serves, transposed by the library.
    """
    reads = ALONG_THE_SUM[layout]
    left, right = _factor(native, a, reads.a), _factor(native, b, reads.b)
    return None if left is None or right is None else BlockFactors(left, right)


def _factor(native: Native, storage: QuantizedStorage, copy: str) -> BlockFactor | None:
    kind = storage.kind
    if copy == "rowwise":
        data, scale_inv = storage.rowwise_data, storage.rowwise_scale_inv
    elif kind.order == ColumnwiseOrder.TRANSPOSED:
        data, scale_inv = storage.columnwise_data, storage.columnwise_scale_inv
    else:
        data = scale_inv = None
    if data is None and kind.mode is ScalingMode.BLOCK_128X128:
        data, scale_inv = _turned(native, storage, copy)
    if data is None or scale_inv is None or not (data.is_contiguous() and scale_inv.is_contiguous()):
        return None
    return BlockFactor(data.view(kind.format.dtype), scale_inv, kind.mode)


def _turned(native: Native, storage: QuantizedStorage, copy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and factors of a missing copy of 128x128 blocks, as a rowwise copy with the contraction last has them."""
    found = block_copy(storage, rowwise=copy == "rowwise")
    wants_columns = copy == "columnwise"
    grid = found.grid.t() if wants_columns else found.grid
    codes = found.codes.contiguous()
    data = codes if found.turned == wants_columns else transposed(native, codes)
    rows, cols = rows_and_cols(storage.shape)
    shape = (cols, rows) if wants_columns else (rows, cols)
    scale_inv = grid.new_zeros(scale_shape(storage.mode, shape, rowwise=True))
    scale_inv[:, : grid.shape[1]] = grid
    return data, scale_inv


def dequantized(native: Native, a: Operand, b: Operand, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands as plain matrices ``[rows, contraction]`` and ``[contraction, cols]``.

    Factors of MXFP8 are powers of two, so that bf16 holds the values; others take fp32.
    """
    reads = ALONG_THE_SUM[layout]
    left, right = _plain(native, a, reads.a), _plain(native, b, reads.b)
    return (left.t() if layout == "wgrad" else left), (right.t() if layout == "fprop" else right)


def _plain(native: Native, operand: Operand, copy: str) -> torch.Tensor:
    if not isinstance(operand, QuantizedStorage):
        return operand.detach()
    dtype = torch.bfloat16 if operand.mode is ScalingMode.MXFP8 else torch.float32
    return dequantize_blocks(native, operand, dtype, rowwise=copy == "rowwise")
