"""Rows of quantized data gathered by an index: codes and scales of each row travel together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.block_scales import block_copy, block_of, fill_with_ones
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    import torch


def gathered_storage(where: str, storage: QuantizedStorage, source: torch.Tensor) -> QuantizedStorage:
    """The rowwise copy of ``storage[source]``; rows of zeros, with scale 1, where ``source`` is negative.

    Args:
        where: names the caller, for messages.
        storage: of ``[tokens, hidden]``.
        source: int64 ``[R]``.

    Raises:
        UnsupportedError: no rowwise copy, or scales that several rows share.
    """
    mode = storage.mode
    shared = mode is not ScalingMode.TENSOR and (mode in NVFP4_MODES or block_of(mode, rowwise=True).down > 1)
    if shared or not storage.kind.rowwise or len(storage.shape) != 2:  # noqa: PLR2004 - rows
        raise UnsupportedError(
            where,
            got=repr(storage),
            accepted="rows with a rowwise copy and scales of their own, or one scale for all: Float8Tensor, "
            "1x128 blocks, MXFP8, MTFP8",
            todo="permute before quantizing, or dequantize() first",
        )
    kind = StorageKind.of(storage.format, mode, rowwise=True, columnwise=False, order=storage.columnwise_order)
    shape = (len(source), storage.shape[1])
    made = QuantizedStorage.empty(kind, shape, storage.dtype, storage.device)
    there = source >= 0
    known = source[there]
    codes, scale_inv, _, _ = made.tensors()
    codes.zero_()  # type: ignore[union-attr] # made with a rowwise copy, as the next ones
    codes[there] = storage.rowwise_data.index_select(0, known)  # type: ignore[index,union-attr]
    if mode is ScalingMode.TENSOR:
        return made.with_tensors((codes, storage.rowwise_scale_inv, None, None))
    fill_with_ones(scale_inv, mode)  # type: ignore[arg-type]
    grid, of_source = block_copy(made, rowwise=True).grid, block_copy(storage, rowwise=True).grid
    grid[there] = of_source[known]
    return made
