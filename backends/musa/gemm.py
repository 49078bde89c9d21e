"""Matrix products on Moore Threads GPUs: which way each goes.

torch_musa's torch._scaled_mm multiplies FP8 from architecture 3.1 on, reads any strides, and so needs no transposed
copies. With 1x128 and 128x128 blocks mate multiplies, where it is installed (groupwise.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.backends.musa import groupwise
from te_hal.backends.musa.device import architecture
from te_hal.ffi.marshalling.block_matmul import has_blocks
from te_hal.ffi.marshalling.gemm_choice import VendorGemm, Way
from te_hal.ffi.marshalling.scaled_matmul import PRECISE_RESULTS
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.schema.support import Kind

_FP8_PRODUCTS = 31
_BF16_PRODUCTS = 22


@functools.cache
def choose(device: torch.device, a: Kind, b: Kind, dtype: torch.dtype | None) -> Way:
    """FP8 by torch._scaled_mm for bf16 results, else decoded; plain by torch.mm, below 2.2 in bf16 by our kernel.

    How torch._scaled_mm adds up there is not known; so other results are decoded as on Hopper, where it is.
    """
    found = architecture(device)
    if has_blocks(a, b):
        return _choose_blocks(found, a, b, dtype)
    if isinstance(a, StorageKind) and isinstance(b, StorageKind):
        if found >= _FP8_PRODUCTS and dtype not in PRECISE_RESULTS and a.mode not in NVFP4_MODES:
            return Way.SCALED
        return Way.DECODED if found >= _BF16_PRODUCTS else Way.PORTABLE
    if isinstance(a, StorageKind) or isinstance(b, StorageKind):
        return Way.PORTABLE
    return Way.PORTABLE if found < _BF16_PRODUCTS and torch.bfloat16 in (a, b) else Way.PLAIN


def _choose_blocks(found: int, a: Kind, b: Kind, dtype: torch.dtype | None) -> Way:
    """By mate where it multiplies them, else from their values; bf16 below 2.2, and plain operands, by our kernel."""
    if not isinstance(a, StorageKind) or not isinstance(b, StorageKind) or found < _BF16_PRODUCTS:
        return Way.PORTABLE
    return Way.GROUPWISE if found >= _FP8_PRODUCTS and groupwise.takes(a, b, dtype) else Way.DEQUANTIZED


GEMM = VendorGemm(choose=choose, fp32_product=False, needs_rows=False, block_product=groupwise.PRODUCT)
