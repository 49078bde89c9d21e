"""Optimizer state in fewer bits: fp16 and 8-bit values with one scale a tensor, bf16 without.

Under Transformer Engine's rule the largest magnitude goes to half of fp16's largest number (so that the next update
does not overflow), or to 448 in E4M3. Values far below it flush to zero, second moments of 8 bits among them.
"""

from __future__ import annotations

from typing import cast

import torch

import te_hal.ops

#: dtype to the value that the largest magnitude goes to; None: stored as it is. uint8 holds E4M3 codes.
_LARGEST = {
    torch.float32: None,
    torch.bfloat16: None,
    torch.float16: torch.finfo(torch.float16).max / 2,
    torch.uint8: 448.0,
}
STATE_DTYPES = tuple(_LARGEST)


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether values of this dtype come with a scale."""
    return _LARGEST[dtype] is not None


def encode(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values in fewer bits, and the fp32 factor ``[1]`` back out of them; None without one.

    Args:
        values: fp32, any shape; not changed, but returned as they are for fp32.
        dtype: one of STATE_DTYPES.
    """
    if dtype == torch.uint8:
        storage = te_hal.ops.quantize_current(values, dtype=torch.float8_e4m3fn)
        return cast("torch.Tensor", storage.rowwise_data), storage.rowwise_scale_inv
    largest = _LARGEST[dtype]
    if largest is None:
        return values.to(dtype), None
    amax = values.abs().amax().view(1) if values.numel() else values.new_zeros(1)
    usable = (amax > 0) & amax.isfinite()
    scale_inv = torch.where(usable, amax / torch.full_like(amax, largest), torch.ones_like(amax))
    return (values / scale_inv.view(())).to(dtype), scale_inv


def decode(stored: torch.Tensor, scale_inv: torch.Tensor | None) -> torch.Tensor:
    """What :func:`encode` stored, in fp32; the same memory for fp32."""
    if stored.dtype == torch.uint8:
        return stored.view(torch.float8_e4m3fn).to(torch.float32) * cast("torch.Tensor", scale_inv).view(())
    values = stored.to(torch.float32)
    return values if scale_inv is None else values * scale_inv.view(())
