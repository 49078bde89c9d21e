"""Matrix products on NVIDIA GPUs: which way each goes, and which copies it reads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.backends.cuda import block_gemm
from te_hal.ffi.marshalling.block_matmul import has_blocks
from te_hal.ffi.marshalling.gemm_choice import VendorGemm, Way
from te_hal.ffi.marshalling.scaled_matmul import PRECISE_RESULTS
from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.formats import E5M2
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.schema.backend import GemmCopies
    from te_hal.schema.formats import ElementFormat, ScalingMode
    from te_hal.schema.support import Kind

#: The first compute capability with FP8 products.
_FP8_PRODUCTS = (8, 9)


@functools.cache
def choose(device: torch.device, a: Kind, b: Kind, dtype: torch.dtype | None) -> Way:
    """FP8 by torch._scaled_mm where the result is bf16, whose rounding hides how that adds up, else decoded.

    Plain operands go by torch.mm, one of each kind to the portable kernel; twice E5M2 is decoded: torch multiplies
    neither. With blocks of 128 and a bf16 result by torch's scaled_mm on Hopper, MXFP8 and the rest from their values;
    NVFP4 is decoded without the scale of the tensor.
    """
    if not isinstance(a, StorageKind) and not isinstance(b, StorageKind):
        return Way.PLAIN
    if not isinstance(a, StorageKind) or not isinstance(b, StorageKind):
        return Way.PORTABLE
    if has_blocks(a, b):
        return Way.BLOCKS if block_gemm.takes(device, a, b, dtype) else Way.DEQUANTIZED
    if a.mode in NVFP4_MODES:
        return Way.DECODED
    has_products = torch.cuda.get_device_capability(device) >= _FP8_PRODUCTS
    scaled = has_products and dtype not in PRECISE_RESULTS and not a.format == b.format == E5M2
    return Way.SCALED if scaled else Way.DECODED


def gemm_copies(layout: str, format: ElementFormat, mode: ScalingMode) -> GemmCopies:  # noqa: ARG001 - the answer's signature
    """FP8 products read both operands along the contraction, so two layouts need transposed copies."""
    return ALONG_THE_SUM[layout]


GEMM = VendorGemm(
    choose=choose,
    fp32_product=hasattr(torch.ops.aten.mm, "dtype"),
    needs_rows=True,
    block_product=block_gemm.PRODUCT,
)
