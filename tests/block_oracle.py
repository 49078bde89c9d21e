"""Casts with a scale per block by brute force: loops over the blocks, numpy's arithmetic, ml_dtypes' rounding.

Independent of te_hal but for the names of modes and formats. The layouts of scale_inv are written out here again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import torch
from fp8_codes import codes_of

from te_hal.schema.formats import ElementFormat, ScalingMode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from te_hal.schema.storage import QuantizedStorage

ROW, SQUARE, MX = ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128, ScalingMode.MXFP8
MODES = (ROW, SQUARE, MX)
#: Rows and columns of a block, by mode and copy (rowwise?).
BLOCKS = {
    (ROW, True): (1, 128),
    (ROW, False): (128, 1),
    (SQUARE, True): (128, 128),
    (SQUARE, False): (128, 128),
    (MX, True): (1, 32),
    (MX, False): (32, 1),
}
#: Whether scale_inv holds the grid of blocks transposed, and the multiples its sizes are padded to.
PLACES = {
    (ROW, True): (True, 1, 4),
    (ROW, False): (False, 1, 4),
    (SQUARE, True): (False, 1, 4),
    (SQUARE, False): (True, 1, 4),
    (MX, True): (False, 128, 4),
    (MX, False): (False, 4, 128),
}


@dataclass(frozen=True)
class Copy:
    """One copy: codes ``[M, K]``, the grid of scale_inv, and the exact values in float64 that both stand for."""

    codes: NDArray[np.uint8]
    grid: NDArray[np.generic]
    values: NDArray[np.float64]


def cast(
    x: torch.Tensor,
    mode: ScalingMode,
    format: ElementFormat,
    *,
    rowwise: bool,
    epsilon: float = 0.0,
    pow2: bool = False,
) -> Copy:
    """What one copy of ``x`` (``[M, K]``) must hold."""
    given, (down, along) = x.float().numpy(), BLOCKS[mode, rowwise]
    rows, cols = given.shape
    counts = -(-rows // down), -(-cols // along)
    codes = np.zeros((rows, cols), np.uint8)
    grid = np.zeros(counts, np.uint8 if mode is MX else np.float32)
    values = np.zeros((rows, cols), np.float64)
    for i, j in itertools.product(*map(range, counts)):
        part = (slice(i * down, (i + 1) * down), slice(j * along, (j + 1) * along))
        amax = block_amax(given[part])
        if mode is MX:
            grid[i, j] = e8m0_code(amax, format)
            scale, factor = 2.0 ** (127.0 - grid[i, j]), 2.0 ** (grid[i, j] - 127.0)
        else:
            scale = float_scale(amax, format, x.dtype, epsilon, pow2)
            with np.errstate(all="ignore"):
                grid[i, j] = factor = np.float32(1) / scale
        codes[part] = codes_of(given[part], format, np.float32(scale))
        values[part] = decoded(codes[part], format) * np.float64(factor)
    return Copy(codes, grid, values)


def block_amax(block: NDArray[np.float32]) -> np.float32:
    """Largest magnitude, NaN left out."""
    known = np.abs(block[~np.isnan(block)])
    return known.max() if known.size else np.float32(0)


def float_scale(
    amax: np.float32, format: ElementFormat, input_dtype: torch.dtype, epsilon: float, pow2: bool
) -> np.float32:
    """S1 to S4, an overflowing quotient becoming the largest finite number of the input's dtype."""
    amax = max(amax, np.float32(epsilon))
    if amax == 0 or np.isinf(amax):
        scale = np.float32(1)
    else:
        with np.errstate(over="ignore"):
            scale = np.float32(format.max) / amax
        if np.isinf(scale):
            scale = np.float32(torch.finfo(input_dtype).max)
    return np.float32(2.0 ** (np.frexp(scale)[1] - 1)) if pow2 else scale


def e8m0_code(amax: np.float32, format: ElementFormat) -> int:
    """The smallest code of a power of two that is not below the fp32 product ``amax * (1 / fp8_max)``; at most 254."""
    target = float(amax * np.float32(1.0 / format.max))
    return next((code for code in range(255) if 2.0 ** (code - 127) >= target), 254)


def e8m0_values(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What E8M0 codes stand for, by ml_dtypes."""
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def decoded(codes: NDArray[np.uint8], format: ElementFormat) -> NDArray[np.float64]:
    """What FP8 codes stand for, by ml_dtypes."""
    kinds = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
    return codes.view(kinds[format.name]).astype(np.float64)


def real_scales(scale_inv: torch.Tensor, mode: ScalingMode, shape: tuple[int, int], *, rowwise: bool) -> torch.Tensor:
    """The grid of a scale_inv, transposed back and without padding, after its shape was compared."""
    (down, along), (turned, outer, inner) = BLOCKS[mode, rowwise], PLACES[mode, rowwise]
    counts = -(-shape[0] // down), -(-shape[1] // along)
    stored = counts[::-1] if turned else counts
    assert tuple(scale_inv.shape) == (-(-stored[0] // outer) * outer, -(-stored[1] // inner) * inner)
    kept = scale_inv[: stored[0], : stored[1]]
    return kept.t() if turned else kept


def assert_holds(storage: QuantizedStorage, x: torch.Tensor, **options: float | bool) -> None:
    """Every copy that ``storage`` has is that of ``x``, of any shape, by brute force, byte for byte."""
    seen = x.reshape(1 if x.dim() < 2 else -1, x.shape[-1] if x.dim() else 1)
    held = [(True, storage.rowwise_data, storage.rowwise_scale_inv)]
    held += [(False, storage.columnwise_data, storage.columnwise_scale_inv)]
    for rowwise, codes, scale_inv in held:
        if codes is not None:
            expected = cast(seen, storage.mode, storage.format, rowwise=rowwise, **options)  # type: ignore[arg-type]
            found = codes.cpu()
            if not rowwise and storage.columnwise_order == "transposed" and x.dim() > 1:
                found = found.movedim(0, -1)
            assert np.array_equal(found.reshape(seen.shape).numpy(), expected.codes), f"codes, rowwise={rowwise}"
            grid = real_scales(scale_inv.cpu(), storage.mode, tuple(seen.shape), rowwise=rowwise)  # type: ignore[union-attr, arg-type]
            assert grid.contiguous().numpy().tobytes() == expected.grid.tobytes(), f"scale_inv, rowwise={rowwise}"


def spoil_padding(storage: QuantizedStorage, byte: int = 0xFF) -> QuantizedStorage:
    """The storage with every byte of its scale_inv's padding overwritten, in place."""
    m, k = 1, storage.shape[-1]
    for size in storage.shape[:-1]:
        m *= size
    for rowwise, scale_inv in ((True, storage.rowwise_scale_inv), (False, storage.columnwise_scale_inv)):
        if scale_inv is not None:
            grid = real_scales(scale_inv, storage.mode, (m, k), rowwise=rowwise)
            kept = grid.clone()
            scale_inv.view(torch.uint8).fill_(byte)
            grid.copy_(kept)
    return storage
