"""MXFP8BlockScaling: a power of two per block of 32 neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import Recipe, check_format, check_is, check_number, refuse_attention
from te_hal.recipe.role_settings import check_backward_override
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.formats import ElementFormat, ScalingMode


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """Microscaling in FP8 (docs/numerics.md, M1 to M4 and B5). Keeps no state.

    Attributes:
        margin: kept for Transformer Engine's signature; scales always map amax into the format, so only 0 is taken.
        fp8_format: ``Format.E4M3``, or ``Format.HYBRID`` for E5M2 gradients.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: None: the backward is quantized. ``"high_precision"``: dgrad and wgrad multiply the operands
            as they were before the cast; ``"dequantized"``: what the forward's codes stand for. Gradients stay plain
            then. Start value: ``TE_HAL_BACKWARD_OVERRIDE``.
        enable_2d_quantization: one scale per 32x32 elements of a weight (M4).
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = ENVIRONMENT.backward_override
    enable_2d_quantization: bool = False

    family: ClassVar[str] = "mxfp8"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.MXFP8

    def _validate(self) -> None:
        check_number(self, "margin", self.margin, (int,), 0, 0)
        check_format(self, self.fp8_format)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        check_backward_override(self, self.backward_override)
        check_is(self, "enable_2d_quantization", self.enable_2d_quantization, bool)

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""
        return self.fp8_format.element_format(forward=forward)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, margin={self.margin}, format={self.fp8_format.name}, "
            f"backward_override={self.backward_override}, enable_2d_quantization={self.enable_2d_quantization}"
        )
