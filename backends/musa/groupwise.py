"""FP8 products of 1x128 with 128x128 blocks by mate, Moore Threads' kernel collection, where it is installed.

Its function takes what fprop and dgrad multiply; a product of two operands with 1x128 blocks (wgrad) it has not.
Written after its documentation, never run on the hardware; the tests run a stand-in of that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from te_hal.ffi.marshalling.block_matmul import BlockProduct
from te_hal.schema.formats import ScalingMode
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.ffi.marshalling.block_matmul import BlockFactors
    from te_hal.ffi.marshalling.plain_matmul import Result
    from te_hal.schema.support import Kind

#: Rows, columns and contraction that share a factor.
_GRANULARITY = (1, 128, 128)
_BLOCK = 128
_RESULTS = (torch.bfloat16, torch.float16)


def takes(a: Kind, b: Kind, dtype: torch.dtype | None) -> bool:
    """Whether mate is there and multiplies these kinds, sizes and addends aside. May import mate."""
    if not isinstance(a, StorageKind) or not isinstance(b, StorageKind) or dtype not in _RESULTS:
        return False
    fits = a.mode is ScalingMode.BLOCK_1X128 and b.mode is ScalingMode.BLOCK_128X128
    return fits and _module() is not None


@functools.cache
def _module() -> Any:  # noqa: ANN401 - a module that need not be there
    """The module of matrix products in mate; None where it is not installed, or (said once) does not load."""
    if importlib.util.find_spec("mate") is None:
        return None
    try:
        module = importlib.import_module("mate.gemm")
    except (ImportError, OSError, RuntimeError) as error:
        return _without(f"does not load ({type(error).__name__}: {error})")
    if hasattr(module, "gemm_fp8_nt_groupwise"):
        return module
    return _without("has no gemm_fp8_nt_groupwise in mate.gemm")


def _without(why: str) -> None:
    warnings.warn(f"mate is installed but {why}: FP8 products with block scales run without it", stacklevel=3)


def _fits(factors: BlockFactors, result: Result) -> bool:
    """Whole blocks, and nothing to add: the product comes rounded to 16 bits."""
    rows, contraction = factors.left.values.shape
    cols = factors.right.values.shape[0]
    return not result.addends() and rows > 0 and min(contraction, cols) > 0 and (contraction | cols) % _BLOCK == 0


def _multiply(factors: BlockFactors, result: Result) -> torch.Tensor:
    """Both grids with the blocks of the contraction outermost, mate's "MN"."""
    rows, contraction = factors.left.values.shape
    left_scales = factors.left.scale_inv[:, :rows].contiguous()
    right_scales = factors.right.scale_inv[:, : contraction // _BLOCK].t().contiguous()
    product: torch.Tensor = _module().gemm_fp8_nt_groupwise(
        factors.left.values,
        factors.right.values,
        left_scales,
        right_scales,
        scale_major_mode="MN",
        scale_granularity_mnk=_GRANULARITY,
        out_dtype=result.dtype,
    )
    return product if result.out is None else result.out.copy_(product)


PRODUCT = BlockProduct(_fits, _multiply)
