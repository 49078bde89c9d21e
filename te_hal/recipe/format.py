"""Format: which 8-bit code forward and backward tensors use."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from te_hal.schema import formats
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.schema.formats import ElementFormat


class FormatRange(NamedTuple):
    """Largest finite magnitudes of the forward and the backward code."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Codes for forward (input, weight, output) and backward (grad_output, grad_input) tensors.

    ``E4M3`` and ``E5M2`` use one code everywhere, ``HYBRID`` E4M3 forward and E5M2 backward, ``E2M1`` the 4-bit
    code. The value is ``(max_fwd, max_bwd)``, as in Transformer Engine.
    """

    E2M1 = FormatRange(6.0, 6.0)
    E4M3 = FormatRange(formats.E4M3.max, formats.E4M3.max)
    E5M2 = FormatRange(formats.E5M2.max, formats.E5M2.max)
    HYBRID = FormatRange(formats.E4M3.max, formats.E5M2.max)

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction.

        Raises:
            ArgumentError: E2M1, which is no 8-bit code.
        """
        if self.name not in _ELEMENT_FORMATS:
            raise ArgumentError(
                "Format.element_format", got=str(self), accepted="a format of 8 bits", todo="use HYBRID or E4M3"
            )
        return _ELEMENT_FORMATS[self.name][0 if forward else 1]


_ELEMENT_FORMATS = {
    "E4M3": (formats.E4M3, formats.E4M3),
    "E5M2": (formats.E5M2, formats.E5M2),
    "HYBRID": (formats.E4M3, formats.E5M2),
}
