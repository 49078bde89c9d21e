"""NVFP4 with loops and ml_dtypes: the independent side of tests. Written after docs/numerics.md alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
LARGEST = F32(np.finfo(F32).max)


class Copy(NamedTuple):
    """One copy, not packed: codes ``[lines, elements]``, scales as E4M3 bytes ``[lines, elements / 16]``, and amax."""

    codes: np.ndarray
    scales: np.ndarray
    amax: np.float32

    def packed(self) -> torch.Tensor:
        """The codes two a byte."""
        return torch.from_numpy(self.codes[:, ::2] | (self.codes[:, 1::2] << 4))

    def values(self) -> np.ndarray:
        """float64 values without any rounding."""
        codes = self.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scales = self.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, 1)
        return codes * scales * float(self.amax) / 2688.0


def cast(values: torch.Tensor, *, square: bool = False) -> Copy:
    """Quantize ``[lines, elements]``, blocks along the elements; with ``square`` over 16 lines as well."""
    x = values.to(torch.float32).numpy()
    lines, elements = x.shape
    amax = _amax(x)
    with np.errstate(all="ignore"):
        scale = min(F32(2688) / amax, LARGEST) if amax else F32(1)
        scale = F32(scale) if scale else F32(1)
        codes = np.zeros((lines, elements), np.uint8)
        scales = np.zeros((lines, elements // 16), np.uint8)
        for line in range(lines):
            first = line // 16 * 16
            for block in range(elements // 16):
                place = slice(16 * block, 16 * block + 16)
                largest = _amax(x[first : first + 16, place] if square else x[line, place])
                wanted = min(F32(largest * F32(scale * F32(1 / 6))), F32(448))
                block_scale = np.array(wanted).astype(ml_dtypes.float8_e4m3fn)
                scales[line, block] = block_scale.view(np.uint8)
                divisor = F32(F32(block_scale) * F32(F32(1) / scale))
                factor = min(F32(1) / divisor, LARGEST)
                codes[line, place] = [_code(F32(value * factor)) for value in x[line, place]]
    return Copy(codes, scales, amax)


def _amax(x: np.ndarray) -> np.float32:
    known = np.abs(x[~np.isnan(x)])
    return known.max() if known.size else F32(0)


def _code(value: np.float32) -> int:
    if math.isnan(value):
        return 7
    return int(np.array(F32(np.clip(value, -6, 6))).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """The transform of each 16 neighbours of ``[lines, elements]``, exact in float64, rounded to bf16 once."""
    matrix = [[(-1.0) ** (i & j).bit_count() * SIGNS[i] / 4 for j in range(16)] for i in range(16)]
    blocks = values.double().view(values.shape[0], -1, 16)
    return (blocks @ torch.tensor(matrix, dtype=torch.float64)).view(values.shape).to(torch.bfloat16)
