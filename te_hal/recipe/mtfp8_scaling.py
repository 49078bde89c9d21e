"""MTFP8BlockScaling: Moore Threads' own scaling of blocks of 128."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.recipe import Recipe, check_format, check_number, refuse_attention
from te_hal.schema.formats import ElementFormat, ScalingMode

if TYPE_CHECKING:
    from collections.abc import Mapping

_TILE = 128


@dataclass(repr=False)
class MTFP8BlockScaling(Recipe):
    """Blocks of 1x128 for activations and gradients, 128x128 for weights (docs/numerics.md, T1 to T3). No state.

    It differs from :class:`Float8BlockScaling` in scales (``scale_inv`` is computed, never a power of two, with a
    floor) and in layout (columnwise data in rowwise order, scales neither transposed nor padded), as
    MT-TransformerEngine has it.

    Attributes:
        margin: only 0 is taken.
        fp8_format: ``Format.HYBRID`` (E4M3 forward, E5M2 backward) or ``Format.E4M3``.
        tile_size: side of a block; only 128 is taken.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    tile_size: int = _TILE
    fp8_dpa: bool = False
    fp8_mha: bool = False

    family: ClassVar[str] = "mtfp8_block_scaling"
    scaling_mode: ClassVar[ScalingMode] = ScalingMode.MTFP8_1X128
    lacks: ClassVar[Mapping[str, tuple[str, str]]] = {
        "backward_override": (
            "the backward is quantized, as in MT-TransformerEngine",
            "leave it out, or use Float8BlockScaling for an overridden backward",
        )
    }

    def _validate(self) -> None:
        check_number(self, "margin", self.margin, (int,), 0, 0)
        check_format(self, self.fp8_format)
        check_number(self, "tile_size", self.tile_size, (int,), _TILE, _TILE)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)

    def mode_of(self, role: str) -> ScalingMode:
        """Blocks of a role."""
        return ScalingMode.MTFP8_128X128 if role == "weight" else ScalingMode.MTFP8_1X128

    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""
        return self.fp8_format.element_format(forward=forward)

    def __repr__(self) -> str:
        return (
            f"recipe_type={type(self).__name__}, margin={self.margin}, format={self.fp8_format.name}, "
            f"tile_size={self.tile_size}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}"
        )
