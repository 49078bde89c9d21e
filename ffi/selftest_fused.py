"""The selftest's cases of fused ops, and how near to cpu_reference their results must be."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.schema.formats import E4M3, E5M2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.schema.op import OpSchema

#: Of an amax or a scale_inv that follows from computed values, in units of the last place.
_UNITS = 2
_SIGN = 0x80  #: of an FP8 code


def fused_cases(draw: Callable[..., torch.Tensor]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Op, operands on the CPU, and flags; scales given and their own."""
    histories = (draw(16, 40, dtype=torch.float32).abs(), draw(1024, 3, dtype=torch.float32).abs())
    scales = (torch.ones(40), torch.ones(3))
    yield "update_delayed_scales", (histories, scales), {"fp8_maxima": (E4M3.max, E5M2.max)}
    for x, power_of_2 in itertools.product((draw(136, 264, spread=8.0), draw(13, 37)), (False, True)):
        yield "quantize_current", (x,), {"dtype": E4M3.dtype, "columnwise": True, "power_of_2": power_of_2}
    x, weight, bias, grad = draw(600, 2048), draw(2048), draw(2048), draw(600, 1024)
    for scale in ((torch.tensor([0.7]),), ()):
        forward, backward = ({"dtype": fmt.dtype, "columnwise": True} for fmt in (E4M3, E5M2))
        yield "layernorm_quantize", (x, weight, bias, *scale), forward
        yield "rmsnorm_quantize", (x, weight, *scale), forward
        yield "activation_quantize", (x, *scale), {"activation": "swiglu", **forward}
        of_swiglu = {"activation": "swiglu", "bias_grad": True, **backward}
        yield "activation_bwd_quantize", (grad, x, *scale), of_swiglu
        yield "bias_grad_quantize", (x, *scale), backward


class Distance(NamedTuple):
    """How far results are from the reference's: codes, scales, and what is not cast."""

    codes_off: int
    codes: int
    most_off: int
    units: int
    error: float


def distance(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Distance:
    """Of pairs of tensors on the CPU: codes are uint8, an amax and a scale_inv one fp32 element."""
    off = codes = most = units = 0
    error = 0.0
    for found, expected in pairs:
        if found.dtype == torch.uint8:
            apart = (_in_order(found) - _in_order(expected)).abs()
            off, codes = off + int((apart > 0).sum()), codes + apart.numel()
            most = max(most, int(apart.max()))
        elif found.numel() == 1 and found.dtype == torch.float32:
            units = max(units, int((found.view(torch.int32) - expected.view(torch.int32)).abs().max()))
        else:
            error = max(error, float((found.double() - expected.double()).norm() / expected.double().norm()))
    return Distance(off, codes, most, units, error)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Integers that are neighbours where the values of two codes are."""
    wide = codes.int()
    return torch.where(wide >= _SIGN, _SIGN - wide, wide)


def judge(schema: OpSchema, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[bool, str]:
    """Whether the op's results are as near as its contract says, and how near they are."""
    found = distance(pairs)
    share = schema.contract.codes_off or 0.0
    # Both are within the bound of the true result.
    bound = 2 * schema.contract.bound[torch.bfloat16]
    passed = found.codes_off <= share * found.codes and found.most_off <= 1
    passed = passed and found.units <= _UNITS and found.error <= bound
    said = f"{found.codes_off} of {found.codes} codes off, by at most {found.most_off}; scales {found.units} units; "
    return passed, f"{said}the rest {found.error:.1e} from cpu_reference, where {bound:.1e} is allowed"
