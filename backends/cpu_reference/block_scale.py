"""Scales of blocks from their amax, and the factors that scale_inv holds (docs/numerics.md, B2, M2, M3 and T2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.backends.cpu_reference.amax import compute_scale

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat

_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_LARGEST_CODE, _NAN_CODE = 254, 255
#: 2**-127 as the bits of an fp32 subnormal.
_CODE_ZERO = 1 << (_MANTISSA_BITS - 1)
_NAN_BITS = 0x7FC00000


class BlockScales(NamedTuple):
    """Of a grid of blocks: what elements are multiplied with, and what scale_inv holds, fp32 or E8M0 codes.

    Without ``scale`` they are divided by scale_inv.
    """

    scale: torch.Tensor | None
    scale_inv: torch.Tensor


def float_scales(
    amax: torch.Tensor, format: ElementFormat, input_dtype: torch.dtype, *, epsilon: float, power_of_2: bool
) -> BlockScales:
    """S1 to S4, the largest finite number of the input's dtype standing for an overflowing quotient (B2)."""
    scale = compute_scale(
        amax,
        fp8_max=format.max,
        epsilon=epsilon,
        power_of_2=power_of_2,
        value_for_inf=torch.finfo(input_dtype).max,
    )
    return BlockScales(scale, torch.ones_like(scale) / scale)


def e8m0_scales(amax: torch.Tensor, format: ElementFormat) -> BlockScales:
    """The factor ``amax * (1 / fp8_max)`` rounded up to a power of two, as a code, and its exact inverse (M2)."""
    bits = (amax * torch.tensor(1.0 / format.max, dtype=torch.float32, device=amax.device)).view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & _MANTISSA
    exact = torch.where(exponent == 0, _CODE_ZERO, 0)  # what a mantissa may be without a step up
    codes = (exponent + (mantissa > exact)).clamp_(max=_LARGEST_CODE)
    return BlockScales(_power_of_2(_LARGEST_CODE - codes), codes.to(torch.uint8))


def mtfp8_scales(amax: torch.Tensor, format: ElementFormat) -> BlockScales:
    """``max(amax, 1e-15) * (1 / fp8_max)``, by which elements are divided (T2)."""
    floor, inverse = (torch.tensor(value, dtype=torch.float32, device=amax.device) for value in (1e-15, 1 / format.max))
    return BlockScales(None, torch.maximum(amax, floor) * inverse)


def factors(scale_inv: torch.Tensor) -> torch.Tensor:
    """fp32 factors of what a grid of scale_inv holds: itself, or the values of its E8M0 codes (M3)."""
    if scale_inv.dtype != torch.uint8:
        return scale_inv
    codes = scale_inv.to(torch.int32)
    return torch.where(codes == _NAN_CODE, _NAN_BITS, _power_of_2(codes).view(torch.int32)).view(torch.float32)


def _power_of_2(code: torch.Tensor) -> torch.Tensor:
    """``2 ** (code - 127)`` in fp32 for int32 codes from 0 to 254, from the bits: exact for the subnormal one, too."""
    return torch.where(code == 0, _CODE_ZERO, code << _MANTISSA_BITS).view(torch.float32)
