"""Operands for gemm tests, with their values in float64. FP8 codes are decoded by ml_dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import torch

from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ElementFormat, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    Operand = torch.Tensor | QuantizedStorage

KINDS: dict[str, torch.dtype | ElementFormat] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": E4M3,
    "e5m2": E5M2,
}

_NUMPY = {E4M3.name: ml_dtypes.float8_e4m3fn, E5M2.name: ml_dtypes.float8_e5m2}


def random_operand(
    kind: str, shape: tuple[int, int], generator: torch.Generator, scale_inv: float = 0.37
) -> tuple[Operand, torch.Tensor]:
    """A random operand of that kind, and the float64 values that it stands for."""
    values = torch.randn(shape, generator=generator)
    dtype = KINDS[kind]
    if isinstance(dtype, torch.dtype):
        plain = values.to(dtype)
        return plain, plain.double()
    codes = torch.from_numpy(values.numpy().astype(_NUMPY[dtype.name]).view(np.uint8))
    return storage(codes, dtype, scale_inv), decoded(codes, dtype) * torch.tensor(scale_inv).double()


def decoded(codes: torch.Tensor, format: ElementFormat) -> torch.Tensor:
    """The values of ``codes`` in float64, by ml_dtypes."""
    return torch.from_numpy(codes.numpy().view(_NUMPY[format.name]).astype(np.float64))


def storage(codes: torch.Tensor, format: ElementFormat, scale_inv: float = 1.0) -> QuantizedStorage:
    """A storage with a rowwise copy alone."""
    return QuantizedStorage(
        format=format,
        mode=ScalingMode.TENSOR,
        shape=tuple(codes.shape),
        dtype=torch.bfloat16,
        rowwise_data=codes,
        rowwise_scale_inv=torch.tensor([scale_inv]),
    )


def columnwise_only(rowwise: QuantizedStorage, order: ColumnwiseOrder) -> QuantizedStorage:
    """The same values with a columnwise copy alone."""
    codes = rowwise.rowwise_data
    assert codes is not None
    return QuantizedStorage(
        format=rowwise.format,
        mode=rowwise.mode,
        shape=rowwise.shape,
        dtype=rowwise.dtype,
        columnwise_data=codes.t().contiguous() if order == ColumnwiseOrder.TRANSPOSED else codes.clone(),
        columnwise_scale_inv=rowwise.rowwise_scale_inv,
        columnwise_order=order,
    )
