"""Casts, their scales and their decoding in numpy: A1, S1 to S4, C1 to C6, B1 to B4, M1 to M3, T1 to T3."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from te_hal.schema.block_scales import scale_grid
from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.testing.oracles import codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from te_hal.schema.storage import QuantizedStorage

    Floats = NDArray[np.float32]

_F32 = np.float32
#: Rows and columns that share a factor, of the rowwise copy; the columnwise one's are the other way round.
_BLOCKS = {
    ScalingMode.BLOCK_1X128: (1, 128),
    ScalingMode.MTFP8_1X128: (1, 128),
    ScalingMode.BLOCK_128X128: (128, 128),
    ScalingMode.MTFP8_128X128: (128, 128),
    ScalingMode.MXFP8: (1, 32),
}
_MTFP8_FLOOR = _F32(1e-15)


def amax_of(values: Floats) -> np.float32:
    """A1."""
    magnitudes = np.abs(values[~np.isnan(values)])
    found: np.float32 = _F32(magnitudes.max()) if magnitudes.size else _F32(0)
    return found


def scale_of(amax: np.float32, fp8_max: float, epsilon: float, value_for_inf: float, *, power_of_2: bool) -> np.float32:
    """S1 to S4."""
    if amax < _F32(epsilon):  # noqa: PLR1730 - NaN compares false and stays
        amax = _F32(epsilon)
    scale: np.float32 = _F32(1)
    if amax == 0 or not np.isfinite(amax):
        return scale
    with np.errstate(over="ignore"):
        scale = _F32(fp8_max) / amax
    if np.isinf(scale):
        scale = _F32(value_for_inf)
    if power_of_2:
        scale = _F32(2.0 ** (int(np.frexp(scale)[1]) - 1))
    return scale


def cast(values: Floats, scale: np.float32, format: ElementFormat) -> NDArray[np.uint8]:
    """C1 to C4 with one scale."""
    with np.errstate(all="ignore"):
        return codes.encode(values * scale, format)


class Copy:
    """One copy of a quantized tensor: codes ``[M, K]``, and the grid of its factors (``[1]`` for one scale)."""

    def __init__(self, made: NDArray[np.uint8], factors: NDArray[Any]) -> None:
        self.codes, self.factors = made, factors


def quantized(
    values: Floats,
    dtype: torch.dtype,
    format: ElementFormat,
    mode: ScalingMode,
    *,
    scale: np.float32 | None = None,
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
    rowwise: bool = True,
) -> Copy:
    """One copy of ``values`` ``[M, K]``, which were of ``dtype``."""
    if mode is ScalingMode.TENSOR:
        used = _F32(1) if scale is None else scale
        with np.errstate(all="ignore"):
            return Copy(cast(values, used, format), np.array([_F32(1) / used], _F32))
    down, along = _BLOCKS[mode] if rowwise else _BLOCKS[mode][::-1]
    counts = -(-values.shape[0] // down), -(-values.shape[1] // along)
    made = np.zeros(values.shape, np.uint8)
    factors = np.zeros(counts, np.uint8 if mode is ScalingMode.MXFP8 else _F32)
    for i, j in itertools.product(*map(range, counts)):
        part = slice(i * down, (i + 1) * down), slice(j * along, (j + 1) * along)
        block = values[part]
        amax = amax_of(block)
        with np.errstate(all="ignore"):
            if mode is ScalingMode.MXFP8:
                factors[i, j] = code = _e8m0(amax, format)
                made[part] = codes.encode((block.astype(np.float64) * 2.0 ** (127 - code)).astype(_F32), format)
            elif mode in (ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128):
                factors[i, j] = factor = np.maximum(amax, _MTFP8_FLOOR) * _F32(_F32(1) / _F32(format.max))
                made[part] = codes.encode(block / factor, format)
            else:
                used = scale_of(amax, format.max, amax_epsilon, torch.finfo(dtype).max, power_of_2=power_of_2)
                factors[i, j] = _F32(1) / used
                made[part] = cast(block, used, format)
    return Copy(made, factors)


def _e8m0(amax: np.float32, format: ElementFormat) -> int:
    """M2: the power of two not below amax times the fp32 number nearest to 1 / fp8_max."""
    target = float(_F32(amax * _F32(1.0 / format.max)))
    return next((code for code in range(255) if 2.0 ** (code - 127) >= target), 254)


def as_rows(tensor: torch.Tensor) -> Floats:
    """``[..., K]`` as fp32 ``[M, K]``."""
    values: Floats = tensor.detach().float().numpy()
    cols = tensor.shape[-1] if tensor.dim() else 1
    rows = 1 if tensor.dim() < 2 else int(np.prod(tensor.shape[:-1]))  # noqa: PLR2004
    return values.reshape(rows, cols)


def dequantized(storage: QuantizedStorage, *, rowwise: bool = True) -> NDArray[np.float32]:
    """C6, B4, M3, T3 before the last rounding: fp32 ``[M, K]``, of the copy that is asked for or the only one."""
    rowwise = rowwise if storage.kind.rowwise and storage.kind.columnwise else storage.kind.rowwise
    made, factors = stored(storage, rowwise=rowwise)
    decoded: Floats = codes.values(storage.format)[made].astype(_F32)
    with np.errstate(all="ignore"):
        if storage.mode is ScalingMode.TENSOR:
            decoded *= factors[0]
            return decoded
        down, along = _BLOCKS[storage.mode] if rowwise else _BLOCKS[storage.mode][::-1]
        if storage.mode is ScalingMode.MXFP8:
            exponents = factors.astype(np.float64) - 127
            factors = np.where(factors == 255, np.nan, 2.0**exponents).astype(_F32)  # noqa: PLR2004 - E8M0's NaN
        spread = factors.repeat(down, 0)[: made.shape[0]].repeat(along, 1)[:, : made.shape[1]]
        decoded *= spread
    return decoded


def stored(storage: QuantizedStorage, *, rowwise: bool) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """A copy of a storage on the CPU as ``[M, K]`` codes and its grid of factors, padding left out."""
    row, row_factors, column, column_factors = storage.tensors()
    made, factors = (row, row_factors) if rowwise else (column, column_factors)
    if made is None or factors is None:
        msg = f"{storage!r} has no {'rowwise' if rowwise else 'columnwise'} copy"
        raise ValueError(msg)
    if not rowwise and storage.kind.order is ColumnwiseOrder.TRANSPOSED and len(storage.shape) > 1:
        made = made.movedim(0, -1)
    cols = storage.shape[-1] if storage.shape else 1
    rows = 1 if len(storage.shape) < 2 else int(np.prod(storage.shape[:-1]))  # noqa: PLR2004
    grid = (
        factors
        if storage.mode is ScalingMode.TENSOR
        else scale_grid(factors, storage.mode, storage.shape, rowwise=rowwise)
    )
    return made.cpu().contiguous().numpy().reshape(rows, cols), grid.cpu().contiguous().numpy()
