"""Float8Tensors for tests, and what they stand for by ml_dtypes."""

from __future__ import annotations

import torch
from fp8_codes import values_of

import te_hal.modules as te
from te_hal.schema import formats

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantizer(dtype: torch.dtype = E4M3, **usages: bool) -> te.Float8CurrentScalingQuantizer:
    return te.Float8CurrentScalingQuantizer(dtype, **usages)


def quantized(*shape: int, dtype: torch.dtype = torch.float32, **usages: bool) -> te.Float8Tensor:
    torch.manual_seed(4)
    return quantizer(**usages)(torch.randn(shape, dtype=dtype))


def plain(q: te.Float8Tensor) -> torch.Tensor:
    """The values by ml_dtypes and one fp32 product."""
    codes = q._data if q._data is not None else q._transpose.movedim(0, -1)
    fmt = formats.E4M3 if q._fp8_dtype == te.DType.kFloat8E4M3 else formats.E5M2
    return (torch.from_numpy(values_of(codes, fmt)) * q._scale_inv).to(q.dtype)


def assert_copies_agree(q: te.Float8Tensor) -> None:
    if q._data is not None and q._transpose is not None:
        assert torch.equal(q._transpose, q._data.movedim(-1, 0) if q.dim() else q._data)


def is_quantized(tensor: torch.Tensor) -> bool:
    return type(tensor) is te.Float8Tensor
