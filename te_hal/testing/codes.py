"""Storages as operands: codes and factors of every kind, without the help of a cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.block_scales import SQUARE_MODES, scale_grid
from te_hal.schema.formats import E5M2, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.testing.fp4_codes import fill_fp4_storage

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat
    from te_hal.schema.storage import QuantizedStorage

_NAN, _INFINITY = 0x7F, 0x7C
_LARGEST = {"E4M3": 0x7E, "E5M2": 0x7B}
_SIGN = 0x80
#: Power of two that factors are moved by.
_POWERS = {"large": 40, "small": -40, "huge": 110, "tiny": -110, "subnormals": -126}


def fill_storage(storage: QuantizedStorage, pattern: str, generator: torch.Generator) -> None:
    """Give every copy codes and factors; the padding of factors is poisoned.

    Copies whose blocks are the same hold the same codes and factors; the others have their own.
    """
    if storage.mode in NVFP4_MODES:
        fill_fp4_storage(storage, pattern, generator)
        return
    row, _, column, _ = storage.tensors()
    shared = storage.mode is ScalingMode.TENSOR or storage.mode in SQUARE_MODES
    codes = _codes(storage.shape, storage.format, pattern, generator)
    state = generator.get_state()
    if row is not None:
        row.copy_(codes)
        _fill_factors(storage, pattern, generator, rowwise=True)
    if column is not None:
        if shared:
            generator.set_state(state)
        else:
            codes = _codes(storage.shape, storage.format, pattern, generator)
        turned = storage.kind.order is ColumnwiseOrder.TRANSPOSED and codes.dim() > 1
        column.copy_(codes.movedim(-1, 0) if turned else codes)
        _fill_factors(storage, pattern, generator, rowwise=False)


def _codes(shape: tuple[int, ...], format: ElementFormat, pattern: str, generator: torch.Generator) -> torch.Tensor:
    """uint8 codes: every byte for "any_bits", else finite ones."""
    if pattern == "any_bits":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    magnitudes = torch.randint(0, _LARGEST[format.name] + 1, shape, dtype=torch.uint8, generator=generator)
    signs = torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) * _SIGN
    if pattern == "zeros":
        return signs
    if pattern == "equal":
        return torch.full(shape, 0x30, dtype=torch.uint8)
    codes = magnitudes | signs
    special = {
        "nan": _NAN,
        "inf": _INFINITY if format is E5M2 else _LARGEST[format.name],
        "maximum": _LARGEST[format.name],
    }
    if pattern in special and codes.numel():
        codes.view(-1)[:: codes.numel() // 3 + 1] = special[pattern]
    return codes


def _fill_factors(storage: QuantizedStorage, pattern: str, generator: torch.Generator, *, rowwise: bool) -> None:
    """One factor per tensor, from its bytes; else the grid of factors, in poisoned padding."""
    factors = storage.rowwise_scale_inv if rowwise else storage.columnwise_scale_inv
    if factors is None:
        return
    grid = factors
    if storage.mode is not ScalingMode.TENSOR:
        factors.view(-1).view(torch.uint8).fill_(0xFF)
        grid = scale_grid(factors, storage.mode, storage.shape, rowwise=rowwise)
    power = _POWERS.get(pattern, 0)
    if factors.dtype is torch.uint8:
        low, high = (0, 256) if pattern == "any_bits" else (122 + power, 130 + power)
        drawn = torch.randint(max(low, 0), high, grid.shape, generator=generator)
        grid.copy_(drawn.clamp(0, 255).to(torch.uint8))
    else:
        grid.copy_(torch.empty(grid.shape).uniform_(0.1, 2.0, generator=generator).double().mul(2.0**power).float())
