"""Products of plain tensors by torch.mm, rounded once (G1 to G4).

Each is written to an ``out``: such calls torch.autocast leaves alone, others it would round to its own dtype. Torch's
precision flags are neither read nor set: whoever allows TF32 or reduced-precision sums gets them here too.
"""

from __future__ import annotations

import torch


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    accumulate: bool,
    fp32_product: bool,
) -> torch.Tensor:
    """``left @ right``, plus bias, plus what ``out`` holds if asked, rounded once to ``dtype``.

    Args:
        left: ``[rows, contraction]``, any strides; fp32, fp16 or bf16.
        right: ``[contraction, cols]``, any strides.
        bias: ``[cols]``, added in fp32.
        out: receives the result; None: a new tensor.
        dtype: of the result.
        accumulate: add to ``out``.
        fp32_product: torch.mm multiplies 16-bit operands into fp32 on this device.
    """
    addends = [addend.detach() for addend in (bias, out if accumulate else None) if addend is not None]
    once = left.dtype == right.dtype == dtype and len(addends) <= 1 and all(x.dtype == dtype for x in addends)
    if not once:
        return finish(_fp32_product(left, right, fp32_product=fp32_product), addends, out, dtype)
    result = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=left.device) if out is None else out
    if addends:
        return torch.addmm(addends[0], left, right, out=result)
    return torch.mm(left, right, out=result)


def _fp32_product(left: torch.Tensor, right: torch.Tensor, *, fp32_product: bool) -> torch.Tensor:
    result = torch.empty(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    if fp32_product and left.dtype == right.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=result)
    return torch.mm(left.float(), right.float(), out=result)


def finish(
    product: torch.Tensor, addends: list[torch.Tensor], out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """An fp32 product with its addends, summed in fp32 in place, then rounded once into ``out`` or a new tensor."""
    for addend in addends:
        product.add_(addend)
    return product.to(dtype) if out is None else out.copy_(product)
