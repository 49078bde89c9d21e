"""NVFP4 in numpy: casts, decoding and operands of products, by NV1 to NV8; codes one a byte, their sign in bit 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from te_hal.schema.block_scales import scale_grid
from te_hal.schema.formats import E4M3, ScalingMode
from te_hal.schema.nvfp4_layout import AMAX_BYTES, unpack
from te_hal.testing.oracles import codes
from te_hal.testing.oracles.philox import draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from te_hal.schema.storage import QuantizedStorage

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_F32 = np.float32
_BLOCK = 16
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], _F32)
_LARGEST_CODE, _SIGN = 7, 0x80
_MAX = np.finfo(_F32).max
_SIGNS = "+++-+------+-+--"
_LARGE, _HALVINGS = 2.0**100, 2.0**32


class Copy(NamedTuple):
    """One copy: codes ``[M, K]``, the grid of its scales' E4M3 codes, and the amax ``[1]``."""

    codes: Bytes
    factors: Bytes
    amax: Floats


def quantized(values: Floats, mode: ScalingMode, *, rowwise: bool, seed: int | None) -> Copy:
    """One copy of ``values`` ``[M, K]``: NV1 to NV6."""
    lines = values if rowwise else values.T
    with np.errstate(all="ignore"):
        if mode is ScalingMode.NVFP4_HADAMARD and not rowwise:
            lines = _rounded_to_bf16(_transform(lines))
        magnitudes = np.abs(np.where(np.isnan(lines), 0, lines))
        amax = _F32(magnitudes.max(initial=0))
        scale = min(_F32(2688) / amax, _MAX) if amax else _F32(1)
        scale = scale or _F32(1)
        of_blocks = _in_blocks(magnitudes).max(2, initial=0)
        if mode is ScalingMode.NVFP4_16X16:
            squares = of_blocks.reshape(lines.shape[0] // _BLOCK, _BLOCK, of_blocks.shape[1]).max(1, initial=0)
            of_blocks = squares.repeat(_BLOCK, 0)
        factors = codes.encode(of_blocks * (scale * _F32(1 / 6)), E4M3)
        decoded = codes.values(E4M3)[factors].astype(_F32)
        multipliers = np.minimum(_F32(1) / (decoded * (_F32(1) / scale)), _MAX).astype(_F32)
        scaled = lines * multipliers.repeat(_BLOCK, 1)
        made = _nearest(scaled) if seed is None else _by_chance(scaled, draws(lines.shape, seed, rowwise=rowwise))
    signs = np.where(np.signbit(scaled) & ~np.isnan(lines), _SIGN, 0)
    found = (np.where(np.isnan(lines), _LARGEST_CODE, made) + signs).astype(np.uint8)
    if not rowwise:
        found, factors = found.T, factors.T
    return Copy(np.ascontiguousarray(found), np.ascontiguousarray(factors), np.array([amax], _F32))


def _nearest(scaled: Floats) -> NDArray[np.int64]:
    """NV4, by distances: of two equal ones the even code's is taken."""
    magnitudes = np.minimum(np.abs(np.nan_to_num(scaled.astype(np.float64), nan=0.0, posinf=6.0, neginf=-6.0)), 6.0)
    distances = np.abs(magnitudes[..., None] - _VALUES)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    found: NDArray[np.int64] = order[distances[..., order].argmin(-1)]
    return found


def _by_chance(scaled: Floats, drawn: NDArray[np.float64]) -> NDArray[np.int64]:
    """NV5."""
    magnitudes = np.minimum(np.abs(np.nan_to_num(scaled.astype(np.float64), nan=0.0, posinf=6.0, neginf=-6.0)), 6.0)
    below = np.searchsorted(_VALUES, magnitudes, side="right") - 1
    above = np.minimum(below + 1, _LARGEST_CODE)
    step = np.where(above > below, _VALUES[above] - _VALUES[below], 1)
    return np.where((magnitudes - _VALUES[below]) / step > drawn, above, below)


def _transform(lines: Floats) -> Floats:
    """NV6 of each 16 neighbours, in fp32, not yet rounded to bf16."""
    return _sums(_in_blocks(lines) * _sign_factors()).reshape(lines.shape)


def _transform_back(lines: Floats) -> Floats:
    return (_sums(_in_blocks(lines)) * _sign_factors()).reshape(lines.shape)


def _in_blocks(lines: Floats) -> Floats:
    return lines.reshape(lines.shape[0], lines.shape[1] // _BLOCK, _BLOCK)


def _sign_factors() -> Floats:
    return np.array([0.25 if sign == "+" else -0.25 for sign in _SIGNS], _F32)


def _sums(blocks: Floats) -> Floats:
    """Sums and differences of elements 1, 2, 4 and 8 apart."""
    for apart in (1, 2, 4, 8):
        made = blocks.copy()
        for i in range(_BLOCK):
            partner = i ^ apart
            made[..., i] = (
                blocks[..., i] + blocks[..., partner] if i < partner else blocks[..., partner] - blocks[..., i]
            )
        blocks = made
    return blocks


def _rounded_to_bf16(values: Floats) -> Floats:
    rounded: Floats = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()
    return rounded


def stored(storage: QuantizedStorage, *, rowwise: bool) -> Copy:
    """A copy of a storage on the CPU."""
    row, row_factors, column, column_factors = storage.tensors()
    packed, factors = (row, row_factors) if rowwise else (column, column_factors)
    if packed is None or factors is None:
        msg = f"{storage!r} has no {'rowwise' if rowwise else 'columnwise'} copy"
        raise ValueError(msg)
    rows, cols = int(np.prod(storage.shape[:-1])), storage.shape[-1]
    lying = unpack(packed.cpu()).reshape((rows, cols) if rowwise else (cols, rows))
    made = (lying if rowwise else lying.t()).contiguous().numpy()
    grid = scale_grid(factors.cpu(), storage.mode, storage.shape, rowwise=rowwise).contiguous().numpy()
    amax = factors[-AMAX_BYTES:].cpu().contiguous().clone().view(torch.float32).numpy()
    return Copy(((made & _LARGEST_CODE) | ((made & 8) << 4)).astype(np.uint8), grid, amax)


def unscaled(copy: Copy) -> Floats:
    """Code times the block's scale, fp32 ``[M, K]``: exact."""
    found: Floats = _decoded(copy.codes) * _spread(codes.values(E4M3)[copy.factors].astype(_F32), copy)
    return found


def _spread(of_blocks: Floats, copy: Copy) -> Floats:
    """A number per block to the block's elements."""
    if not copy.codes.size:
        return np.ones(copy.codes.shape, _F32)
    rows, cols = copy.factors.shape
    along = copy.codes.shape == (rows, cols * _BLOCK)
    return of_blocks.repeat(_BLOCK, 1 if along else 0)


def _decoded(made: Bytes) -> Floats:
    found: Floats = np.copysign(_VALUES[made & _LARGEST_CODE], np.where(made & _SIGN, _F32(-1), _F32(1)))
    return found


def read(storage: QuantizedStorage, *, rowwise: bool) -> Copy:
    """The copy that is asked for, or the only one."""
    kind = storage.kind
    return stored(storage, rowwise=kind.rowwise if rowwise else not kind.columnwise)


def operand(storage: QuantizedStorage, *, rowwise: bool) -> tuple[NDArray[np.float64], float]:
    """What a product reads, and the factor of the tensor (NV8)."""
    copy = read(storage, rowwise=rowwise)
    return unscaled(copy).astype(np.float64), float(copy.amax[0] * _F32(1 / 2688))


def dequantized(storage: QuantizedStorage) -> Floats:
    """NV7 before the last rounding, of the rowwise copy or the only one: fp32 ``[M, K]``."""
    copy = read(storage, rowwise=True)
    with np.errstate(all="ignore"):
        amax, inverse = copy.amax[0], _F32(1 / 2688)
        if _LARGE <= amax < np.inf:
            amax, inverse = _F32(amax / _HALVINGS), _F32(inverse * _HALVINGS)
        factors: Floats = codes.values(E4M3)[copy.factors].astype(_F32) * amax * inverse
        values: Floats = _decoded(copy.codes) * _spread(factors, copy)
        if storage.mode is ScalingMode.NVFP4_HADAMARD and not storage.kind.rowwise:
            values = np.ascontiguousarray(_transform_back(np.ascontiguousarray(values.T)).T)
    return values
