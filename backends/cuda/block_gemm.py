"""FP8 products with scales per 1x128 and 128x128 block by torch's scaled_mm, on Hopper (docs/numerics.md, B5).

Transformer Engine's layouts of scale_inv are what cuBLAS reads: no factor is copied. Only bf16 results: the sums of
Hopper's FP8 units are off by more than the schema allows in fp32, as with one scale per tensor. Written after torch's
sources and documentation; tests with stand-ins for torch's function run everywhere, those of tests/backends/native on
a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.ffi.marshalling.block_matmul import BlockProduct
from te_hal.schema.formats import E5M2, ScalingMode
from te_hal.schema.storage import StorageKind

if TYPE_CHECKING:
    from te_hal.ffi.marshalling.block_matmul import BlockFactor, BlockFactors
    from te_hal.ffi.marshalling.plain_matmul import Result
    from te_hal.schema.support import Kind

_HOPPER = 9
_CUDA = (12, 9)
#: Of sizes, and in bytes of addresses; of rows, whose factors lie in steps of 16 bytes.
_MULTIPLE, _ROWS_MULTIPLE = 16, 4


def takes(device: torch.device, a: Kind, b: Kind, dtype: torch.dtype | None) -> bool:
    """Whether torch's scaled_mm multiplies these kinds on a device, the sizes aside."""
    if not isinstance(a, StorageKind) or not isinstance(b, StorageKind) or dtype is not torch.bfloat16:
        return False
    vectors = ScalingMode.BLOCK_1X128 in (a.mode, b.mode)  # there is no product of two operands with square blocks
    return vectors and ScalingMode.MXFP8 not in (a.mode, b.mode) and not a.format == b.format == E5M2 and _built(device)


def _built(device: torch.device) -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if not hasattr(torch.nn.functional, "scaled_mm") or version < _CUDA:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def _fits(factors: BlockFactors, result: Result) -> bool:  # noqa: ARG001 - of BlockProduct: any result is taken
    left, right = factors.left.values, factors.right.values
    rows, contraction = left.shape
    cols = right.shape[0]
    aligned = (left.data_ptr() | right.data_ptr()) % _MULTIPLE == 0
    sizes = rows % _ROWS_MULTIPLE == 0 and (contraction | cols) % _MULTIPLE == 0
    return aligned and sizes and rows > 0 and contraction > 0 and cols > 0


def _multiply(factors: BlockFactors, result: Result) -> torch.Tensor:
    """A bias of the result's dtype goes along; any other one, and the accumulation, follow in fp32."""
    bias, addends = None, result.addends()
    if len(addends) == 1 and not result.accumulate and addends[0].dtype == result.dtype:
        bias = addends.pop()
    functional: Any = torch.nn.functional
    product: torch.Tensor = functional.scaled_mm(
        factors.left.values,
        factors.right.values.t(),
        _scales(factors.left),
        _recipe(factors.left),
        _scales(factors.right),
        _recipe(factors.right),
        bias=bias,
        output_dtype=torch.float32 if addends else result.dtype,
    )
    if addends:
        return result.finish(product, addends)
    return product if result.out is None else result.out.copy_(product)


def _scales(factor: BlockFactor) -> torch.Tensor:
    """1x128: ``[rows, blocks]``; 128x128: ``[blocks up to a multiple of 4, blocks of rows]``; rows lie side by side."""
    turned = factor.scale_inv.t()
    return turned[: factor.values.shape[0]] if factor.mode is ScalingMode.BLOCK_1X128 else turned


def _recipe(factor: BlockFactor) -> object:
    functional: Any = torch.nn.functional
    recipes = functional.ScalingType
    return recipes.BlockWise1x128 if factor.mode is ScalingMode.BLOCK_1X128 else recipes.BlockWise128x128


PRODUCT = BlockProduct(_fits, _multiply)
