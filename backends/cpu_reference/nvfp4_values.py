"""What NVFP4 codes stand for: dequantize, and operands of products (docs/numerics.md, NV7 and NV8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.backends.cpu_reference.chunks import row_spans
from te_hal.backends.cpu_reference.fp4_codes import LARGEST, decode_pairs
from te_hal.backends.cpu_reference.hadamard import transform_back
from te_hal.schema.block_scales import block_copy, rows_and_cols
from te_hal.schema.formats import E4M3, ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK, tensor_amax

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

#: A larger amax is halved so often before it meets a block's scale, and the product doubled again.
_LARGE, _LESS = 2.0**100, 2.0**-32


def unscaled_values(storage: QuantizedStorage, dtype: torch.dtype, *, rowwise: bool) -> torch.Tensor:
    """Code times block scale, exact in bf16 and fp32: what a product takes of that copy (NV8).

    Returns:
        ``[M, K]``; a transposed view where the copy is columnwise.
    """
    copy = block_copy(storage, rowwise=rowwise)
    factors = _block_scales(copy.grid.t() if copy.rowwise is False else copy.grid).to(dtype)
    values = _lines(storage, copy.codes, copy.rowwise, factors, dtype)
    return values if copy.rowwise else values.t()


def tensor_factor(storage: QuantizedStorage, *, rowwise: bool) -> float:
    """What a product of the unscaled values is multiplied with for that copy: amax / (6 * 448), in fp32 (NV8)."""
    largest = _amax_of(storage, block_copy(storage, rowwise=rowwise).rowwise)
    return float(largest.mul(torch.full_like(largest, 1 / (E4M3.max * LARGEST))))


def dequantize_nvfp4(storage: QuantizedStorage, dtype: torch.dtype) -> torch.Tensor:
    """``code * (block scale * amax / (6 * 448))`` in fp32, rounded once to ``dtype`` (NV7).

    Of a columnwise copy of transformed values, the transform is taken back before that rounding.
    """
    copy = block_copy(storage, rowwise=True)
    scales = _block_scales(copy.grid.t() if copy.rowwise is False else copy.grid)
    values = _lines(storage, copy.codes, copy.rowwise, _factors(scales, _amax_of(storage, copy.rowwise)), torch.float32)
    if not copy.rowwise:
        values = values.t().contiguous()
        if storage.mode is ScalingMode.NVFP4_HADAMARD:
            transform_back(values, torch.empty_like(values))
    return values.view(storage.shape).to(dtype)


def _factors(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """``(scale * amax) * (1 / 2688)``, two products in fp32 that do not overflow on the way."""
    large = (amax >= _LARGE) & amax.isfinite()
    inverse = torch.full_like(amax, 1 / (E4M3.max * LARGEST))
    amax, inverse = torch.where(large, amax * _LESS, amax), torch.where(large, inverse / _LESS, inverse)
    return scales * amax * inverse


def _block_scales(grid: torch.Tensor) -> torch.Tensor:
    return grid.contiguous().view(E4M3.dtype).to(torch.float32)


def _amax_of(storage: QuantizedStorage, rowwise: bool) -> torch.Tensor:
    scale_inv = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    return tensor_amax(scale_inv)  # type: ignore[arg-type] # comes with its codes


def _lines(
    storage: QuantizedStorage, codes: torch.Tensor, rowwise: bool, factors: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Decoded codes times the factors ``[lines, blocks]``, ``[lines, elements]`` as they lie in memory."""
    rows, cols = rows_and_cols(storage.shape)
    lines, elements = (rows, cols) if rowwise else (cols, rows)
    result = torch.empty(lines, elements, dtype=dtype, device=codes.device)
    packed = codes.reshape(lines, elements // 2)
    for span in row_spans(result):
        blocks = decode_pairs(packed[span], dtype).view(-1, elements // BLOCK, BLOCK)
        torch.mul(blocks, factors[span][..., None], out=result[span].view_as(blocks))
    return result
