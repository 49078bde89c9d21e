"""Storages in NVFP4 as operands: codes, scales and amax of every kind, without the help of a cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import rows_and_cols, scale_grid
from te_hal.schema.formats import ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK, pack, set_tensor_amax

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage

_SIGN, _LARGEST, _EVERYDAY = 8, 7, 2
#: Powers of two that the amax is moved by.
_POWERS = {"large": 40, "small": -40, "huge": 115, "tiny": -110, "subnormals": -126}


def fill_fp4_storage(storage: QuantizedStorage, pattern: str, generator: torch.Generator) -> None:
    """Give every copy codes, scales and an amax; the padding of scales is poisoned.

    With squares both copies hold the same codes and scales; otherwise each has its own.
    """
    square = storage.mode is ScalingMode.NVFP4_16X16
    state = generator.get_state()
    row, row_scale_inv, column, column_scale_inv = storage.tensors()
    for rowwise, packed, scale_inv in ((True, row, row_scale_inv), (False, column, column_scale_inv)):
        if packed is None or scale_inv is None:
            continue
        if square:
            generator.set_state(state)
        codes = _codes(rows_and_cols(storage.shape), pattern, generator)
        packed.copy_(pack(codes if rowwise else codes.t()).view(packed.shape))
        scale_inv.fill_(0xFF)
        grid = scale_grid(scale_inv, storage.mode, storage.shape, rowwise=rowwise)
        if grid.numel():
            grid.copy_(_scales(storage, (grid.shape[0], grid.shape[1]), pattern, generator, rowwise=rowwise))
        amax = torch.empty(1).uniform_(500.0, 3000.0, generator=generator).double() * 2.0 ** _POWERS.get(pattern, 0)
        set_tensor_amax(scale_inv, torch.full((1,), float("inf")) if pattern == "any_bits" else amax.float())


def _codes(shape: tuple[int, int], pattern: str, generator: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    if pattern == "zeros":
        return codes & _SIGN
    if pattern == "equal":
        return torch.full_like(codes, _EVERYDAY)
    return codes | _LARGEST if pattern == "maximum" else codes


def _scales(
    storage: QuantizedStorage, shape: tuple[int, int], pattern: str, generator: torch.Generator, *, rowwise: bool
) -> torch.Tensor:
    """E4M3 codes about 1, or any; of squares each for 16 lines."""
    low, high = (0, 0x80) if pattern in ("any_bits", "nan") else (0x30, 0x48)
    square = storage.mode is ScalingMode.NVFP4_16X16
    rows, cols = rows_and_cols(storage.shape)
    drawn = (rows // BLOCK, cols // BLOCK) if square else shape
    scales = torch.randint(low, high, drawn, dtype=torch.uint8, generator=generator)
    return scales.repeat_interleave(BLOCK, 0 if rowwise else 1) if square else scales
