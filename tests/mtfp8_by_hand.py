"""Casts by Moore Threads' rule with loops over blocks, numpy and ml_dtypes: the independent side of tests."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import block_oracle
import ml_dtypes
import numpy as np

from te_hal.schema.formats import ElementFormat, ScalingMode

if TYPE_CHECKING:
    import torch

_CODES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def cast(x: torch.Tensor, mode: ScalingMode, format: ElementFormat, *, rowwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[M, K]`` and scale_inv of ``x`` (``[M, K]``), block by block."""
    given = x.float().numpy()
    down, along = (128, 128) if mode is ScalingMode.MTFP8_128X128 else (1, 128) if rowwise else (128, 1)
    counts = -(-given.shape[0] // down), -(-given.shape[1] // along)
    codes, scales = np.zeros(given.shape, np.uint8), np.zeros(counts, np.float32)
    for i, j in itertools.product(*map(range, counts)):
        part = (slice(i * down, (i + 1) * down), slice(j * along, (j + 1) * along))
        amax = max(block_oracle.block_amax(given[part]), np.float32(1e-15))
        scales[i, j] = amax * np.float32(1.0 / format.max)
        with np.errstate(all="ignore"):
            scaled = np.clip(given[part] / scales[i, j], -format.max, format.max)
            codes[part] = np.where(np.isnan(scaled), 0x7F, scaled.astype(_CODES[format.name]).view(np.uint8))
    return codes, scales
