"""FP8 codes and values by ml_dtypes, the independent source of the cast tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from te_hal.schema.formats import E4M3, E5M2, ElementFormat

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

ML_DTYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def codes_of(values: NDArray[np.float32], format: ElementFormat, scale: float = 1.0) -> NDArray[np.uint8]:
    """Clamp the fp32 product and let ml_dtypes round it; every NaN becomes 0x7F."""
    with np.errstate(all="ignore"):
        product = values.astype(np.float32) * np.float32(scale)
        clamped = np.clip(product, np.float32(-format.max), np.float32(format.max))
        codes = clamped.astype(ML_DTYPES[format]).view(np.uint8)
    return np.where(np.isnan(product), np.uint8(0x7F), codes)


def values_of(codes: torch.Tensor, format: ElementFormat) -> NDArray[np.float32]:
    """What uint8 codes stand for."""
    return codes.contiguous().numpy().view(ML_DTYPES[format]).astype(np.float32)
