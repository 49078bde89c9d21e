"""How a quantized tensor prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import block_copy, rows_and_cols
from te_hal.schema.formats import E4M3, ScalingMode
from te_hal.schema.nvfp4_layout import AMAX_OF_ONE, NVFP4_MODES, decoded, tensor_amax

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
    if storage.mode in NVFP4_MODES:
        return _nvfp4_values(storage)
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


def _nvfp4_values(storage: QuantizedStorage) -> torch.Tensor | str:
    copy = block_copy(storage, rowwise=True)
    if storage.mode is ScalingMode.NVFP4_HADAMARD and not copy.rowwise:
        return f"shape={storage.shape}, device={storage.device}, transformed"
    grid = copy.grid if copy.rowwise else copy.grid.t()
    factors = grid.cpu().contiguous().view(E4M3.dtype).to(torch.float32)
    values = decoded(copy.codes.cpu()).reshape(*factors.shape, -1) * factors[..., None]
    scale_inv = storage.rowwise_scale_inv if copy.rowwise else storage.columnwise_scale_inv
    values = values.flatten(1) * (tensor_amax(scale_inv).cpu() / AMAX_OF_ONE)  # type: ignore[arg-type] # comes with its codes
    return (values if copy.rowwise else values.t()).reshape(storage.shape).to(storage.dtype)
