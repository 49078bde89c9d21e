"""FP8 by table: every code's value worked out from its bits, and casting as the search for the nearest value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from te_hal.schema.formats import ElementFormat

#: Bits of the exponent and of the mantissa, and the exponent's bias.
_BITS = {"E4M3": (4, 3, 7), "E5M2": (5, 2, 15)}
_NAN = 0x7F
_SIGN = 0x80


def values(format: ElementFormat) -> NDArray[np.float64]:
    """What each of the 256 codes stands for."""
    return np.array([_value(code, format) for code in range(256)])


def _value(code: int, format: ElementFormat) -> float:
    exponent_bits, mantissa_bits, bias = _BITS[format.name]
    sign = -1.0 if code & _SIGN else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if format.name == "E4M3" and code & 0x7F == _NAN:
        return float("nan")
    if format.name == "E5M2" and exponent == 2**exponent_bits - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
    return float(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))


def encode(product: NDArray[np.float32], format: ElementFormat) -> NDArray[np.uint8]:
    """C1 to C4 of an fp32 product: clamp, then the nearest value; of two the one with the even code."""
    largest = {"E4M3": 0x7E, "E5M2": 0x7B}[format.name]
    table = values(format)[: largest + 1]
    magnitude = np.minimum(
        np.abs(np.nan_to_num(product.astype(np.float64), nan=0.0, posinf=1e300, neginf=-1e300)), table[-1]
    )
    above = np.clip(np.searchsorted(table, magnitude), 1, largest)
    below = above - 1
    middle = (table[below] + table[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    code = np.where(up, above, below) + np.where(np.signbit(product), _SIGN, 0)
    return np.where(np.isnan(product), _NAN, code).astype(np.uint8)
