"""Products of plain tensors by torch.mm, rounded once (G1 to G4).

Each is written to an ``out``: such calls torch.autocast leaves alone, others it would round to its own dtype. Torch's
precision flags are neither read nor set: whoever allows TF32 or reduced-precision sums gets them here too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Longest stretch of the contraction in one product of 16-bit operands into fp32. Matrix units cut off where they
#: add up, which grows with the length: measured on an H200 in bf16 and fp16, 2.1e-6 and 2.5e-6 for 2048, 4.4e-6 and
#: 4.9e-6 for 4096, 1.9e-5 for 16384, where the schema allows 3e-6. 4096 x 4096 x 16384 takes 0.90 ms instead of 0.69.
_STRETCH = 2048


class Result(NamedTuple):
    """What becomes of a product: bias ``[cols]``, ``out`` to write to, dtype, and whether ``out`` is added to."""

    bias: torch.Tensor | None
    out: torch.Tensor | None
    dtype: torch.dtype
    accumulate: bool

    def addends(self) -> list[torch.Tensor]:
        """What is added before the rounding."""
        if self.bias is None and not self.accumulate:
            return []
        given = (self.bias, self.out if self.accumulate else None)
        return [addend.detach() if addend.requires_grad else addend for addend in given if addend is not None]

    def finish(self, product: torch.Tensor, addends: list[torch.Tensor]) -> torch.Tensor:
        """An fp32 product with its addends, summed in fp32 in place, then rounded once."""
        for addend in addends:
            product.add_(addend)
        return product.to(self.dtype) if self.out is None else self.out.copy_(product)


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    scales: list[torch.Tensor],
    result: Result,
    *,
    fp32_product: bool,
    dequantized: bool = False,
) -> torch.Tensor:
    """``left @ right`` times the scales, plus bias, plus what ``out`` holds if asked, rounded once.

    Args:
        left: ``[rows, contraction]``, any strides; fp32, fp16 or bf16.
        right: ``[contraction, cols]``, any strides.
        scales: fp32, one element each; none, one or two.
        result: what becomes of the product.
        fp32_product: torch.mm multiplies 16-bit operands into fp32 on this device.
        dequantized: an operand was quantized. The product is then always fp32: one that torch rounds may have been
            split, and its parts rounded to 16 bits before they were added (torch.backends.cuda.matmul, flag
            allow_bf16_reduced_precision_reduction, which is set by default).
    """
    addends = result.addends()
    once = (
        not dequantized
        and not scales
        and len(addends) <= 1
        and all(x.dtype == result.dtype for x in (left, right, *addends))
    )
    if once:
        return _rounded_by_torch(left, right, addends, result)
    product = _fp32_product(left, right, fp32_product=fp32_product)
    return result.finish(_scaled(product, scales), addends)


def _rounded_by_torch(
    left: torch.Tensor, right: torch.Tensor, addends: list[torch.Tensor], result: Result
) -> torch.Tensor:
    out = result.out
    if out is None:
        out = torch.empty(left.shape[0], right.shape[1], dtype=result.dtype, device=left.device)
    return torch.addmm(addends[0], left, right, out=out) if addends else torch.mm(left, right, out=out)


def _fp32_product(left: torch.Tensor, right: torch.Tensor, *, fp32_product: bool) -> torch.Tensor:
    product = torch.empty(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    if not fp32_product or left.dtype != right.dtype or left.dtype == torch.float32:
        return torch.mm(left.float(), right.float(), out=product)
    torch.mm(left[:, :_STRETCH], right[:_STRETCH], out_dtype=torch.float32, out=product)
    for start in range(_STRETCH, left.shape[1], _STRETCH):
        stretch = slice(start, start + _STRETCH)
        torch.addmm(product, left[:, stretch], right[stretch], out_dtype=torch.float32, out=product)
    return product


def _scaled(product: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
    """The product times its scales in place, the larger one first (G3); no scale is fetched from the device."""
    if len(scales) == 2:  # noqa: PLR2004 - both operands were quantized
        scales = [torch.maximum(*scales), torch.minimum(*scales)]
    for scale in scales:
        product.mul_(scale.view(()))
    return product
