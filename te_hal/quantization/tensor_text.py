"""How a quantized tensor prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import block_copy, rows_and_cols
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage


def text_of(storage: QuantizedStorage, *, requires_grad: bool) -> str:
    """Values and facts, for between the brackets behind the class."""
    scale_inv = storage.copy_to_read()[1]
    shown = scale_inv if scale_inv.numel() == 1 else f"{scale_inv.dtype} of shape {tuple(scale_inv.shape)}"
    facts = [f"{storage.kind!r}", f"dtype={storage.dtype}", f"scale_inv={shown}"]
    facts += [f"requires_grad={requires_grad}"] * requires_grad
    return f"{_values_to_show(storage)}, {', '.join(facts)}"


def _values_to_show(storage: QuantizedStorage) -> torch.Tensor | str:
    """By torch alone: printing works where no backend does."""
    codes, scale_inv, transposed = storage.copy_to_read()
    if codes.is_meta:
        return f"shape={storage.shape}, device={storage.device}"
    if transposed:
        codes = codes.movedim(0, -1)
    values = codes.cpu().contiguous().view(storage.format.dtype).to(torch.float32)
    if storage.mode is ScalingMode.TENSOR:
        return (values * scale_inv.cpu()).to(storage.dtype)
    rows, cols = rows_and_cols(storage.shape)
    copy = block_copy(storage, rowwise=True)
    grid = copy.grid.cpu()
    if grid.dtype == torch.uint8:  # E8M0
        grid = torch.exp2(grid.to(torch.float32) - 127).masked_fill(grid == 0xFF, torch.nan)  # noqa: PLR2004 - its NaN
    factors = grid.repeat_interleave(copy.block.down, 0)[:rows].repeat_interleave(copy.block.along, 1)[:, :cols]
    return (values * factors.reshape(values.shape)).to(storage.dtype)
