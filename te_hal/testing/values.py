"""Hard values: what a plain operand may be filled with, by the name that stands in a case's id."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.op import OpSchema

    Pattern = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]

_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _wide(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Over 17 powers of e."""
    spread = torch.empty(shape).uniform_(-8, 9, generator=generator)
    return (torch.randn(shape, generator=generator) * spread.exp()).to(dtype)


def _any_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern of the dtype is possible: NaN, infinities, subnormals."""
    limits = torch.iinfo(_INTEGERS[dtype])
    bits = torch.randint(limits.min, limits.max, shape, dtype=_INTEGERS[dtype], generator=generator)
    return bits.view(dtype) if bits.dim() else bits.view(1).view(dtype).view(())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Of either sign."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    return (torch.zeros(shape) * signs).to(dtype)


def _ties(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Halfway between neighbours of E4M3 (odd 16ths) and of E5M2 (odd 8ths), in four binades; the largest is 1.9375."""
    odd = torch.randint(0, 16, shape, generator=generator) * 2 + 1
    binade = torch.randint(-3, 1, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    ties_of_e4m3 = 1.0 + (odd % 16) / 16.0
    ties_of_e5m2 = 1.0 + (odd % 8) / 8.0
    return (signs * torch.where(odd < 16, ties_of_e4m3, ties_of_e5m2) * torch.exp2(binade.float())).to(dtype)  # noqa: PLR2004


def _subnormals(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator).double() * torch.finfo(dtype).tiny / 8).to(dtype)


def _scattered(*specials: float) -> Pattern:
    """Everyday values with some of these among them."""

    def pattern(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        if values.numel():
            flat = values.view(-1)
            places = torch.randperm(flat.numel(), generator=generator)[: flat.numel() // 97 + 1]
            chosen = torch.tensor(specials)[torch.arange(len(places)) % len(specials)]
            flat[places] = chosen.to(dtype)
        return values

    return pattern


def _maximum(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Around the largest codes of both formats, and beyond."""
    edges = torch.tensor([448.0, 447.0, 449.0, 464.0, 465.0, 480.0, 57344.0, 57343.0, 61440.0, 65000.0])
    chosen = edges[torch.randint(0, len(edges), shape, generator=generator)]
    return (chosen * (torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0)).to(dtype)


def _equal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every element the same, so that a row has no variance."""
    del generator
    return torch.full(shape, -2.0, dtype=dtype)


def _outlier(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """One element a thousand times as large as the others."""
    values = torch.randn(shape, generator=generator)
    if values.numel():
        values.view(-1)[values.numel() // 2] = 1000.0
    return values.to(dtype)


def _scaled(power: int, fp16_power: int) -> Pattern:
    """Everyday values times a power of two."""

    def pattern(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        exponent = fp16_power if dtype is torch.float16 else power
        return (torch.randn(shape, generator=generator).double() * 2.0**exponent).to(dtype)

    return pattern


#: Values of any magnitude, for ops whose every byte is fixed.
_EXACT: dict[str, Pattern] = {
    "wide": _wide,
    "zeros": _zeros,
    "ties": _ties,
    "any_bits": _any_bits,
    "subnormals": _subnormals,
    "nan": _scattered(math.nan),
    "inf": _scattered(math.inf, -math.inf),
    "maximum": _maximum,
    "equal": _equal,
    "outlier": _outlier,
    "huge": _scaled(120, 13),
    "tiny": _scaled(-120, -14),
}
#: Values whose squares and products stay within fp32, for ops that compute within a bound.
_BOUNDED: dict[str, Pattern] = {
    "normal": _normal,
    "zeros": _zeros,
    "nan": _scattered(math.nan),
    "inf": _scattered(math.inf, -math.inf),
    "equal": _equal,
    "outlier": _outlier,
    "large": _scaled(40, 6),
    "small": _scaled(-40, -12),
}
#: Of ops whose formulas leave it to the implementation what an infinity, or a very large input, gives.
_EVERYDAY = ("normal", "zeros", "nan", "equal", "small")

PATTERNS: dict[str, Pattern] = _EXACT | _BOUNDED


def patterns_of(schema: OpSchema) -> tuple[str, ...]:
    """The patterns that an op is tried with, the everyday one first."""
    if schema.contract.exact:
        return tuple(_EXACT)
    if schema.contract.codes_off is not None or schema.family.value == "activation":
        return (*_EVERYDAY, "outlier")
    if schema.family.value == "softmax":
        return (*_EVERYDAY, "inf", "outlier")
    return tuple(_BOUNDED)


def fill(pattern: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A dense tensor on the CPU, filled with a pattern; the same for the same generator state."""
    return PATTERNS[pattern](shape, dtype, generator)
