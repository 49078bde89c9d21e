"""CustomRecipe: a user's factory says by which quantizer each tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from te_hal.recipe.format import Format
from te_hal.recipe.quantizer_factory import check_key
from te_hal.recipe.recipe import Recipe, check_number, refuse_attention
from te_hal.recipe.role_settings import check_backward_override
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentTypeError, StateError, UnsupportedError
from te_hal.schema.refusals import declare

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from te_hal.schema.formats import ElementFormat, ScalingMode

_REFUSED = declare(
    "recipe.CustomRecipe",
    {"fp8_format": Format.HYBRID},
    {"fp8_format": "which nothing reads: the factory decides each tensor's format"},
)

_ALIGNMENT = 128


@dataclass(repr=False)
class CustomRecipe(Recipe):
    """Quantizers from a factory, role by role (docs/recipes.md has the contract).

    Attributes:
        qfactory: called with the te.QuantizerRole of every tensor of a module (None for a result whose consumer the
            module does not know), once each time the module's quantizers are built. Returns a te.Quantizer, a
            te.QuantizerRequest, or an object with methods ``quantize(tensor)`` and ``dequantize(what that gave)``.
        fp8_format: kept for Transformer Engine's signature; the factory decides, so only the default is taken.
        fp8_dpa, fp8_mha: FP8 attention; True is refused.
        backward_override: None: the backward is quantized. ``"high_precision"``: dgrad and wgrad multiply the operands
            as they were before the cast; ``"dequantized"``: what the forward's codes stand for. Gradients stay plain
            then. Start value: ``TE_HAL_BACKWARD_OVERRIDE``.
        quantization_alignment: multiple that te.Fp8Padding pads groups of rows to.
        qfactory_key: says which policy the factory is (start value: that of ``recipe.quantizer_factory``, if any).
            Recipes with equal keys answer alike: the factory is asked again only where the key changes. None: changes
            of the factory are looked for in what it refers to.
    """

    qfactory: Callable[[Any], Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = ENVIRONMENT.backward_override
    quantization_alignment: int = _ALIGNMENT
    qfactory_key: Hashable = None

    family: ClassVar[str] = "custom"

    def _assign(self, name: str, value: Any) -> None:  # noqa: ANN401 - validated below
        super()._assign(name, value)
        if name == "qfactory" or (name == "qfactory_key" and value is None):
            super()._assign("qfactory_key", getattr(self.qfactory, "qfactory_key", None))

    def __eq__(self, other: object) -> bool:
        """By fields; factories of one key count as one."""
        if type(other) is not type(self):
            return NotImplemented
        return _compared(self) == _compared(other)

    __hash__ = None  # type: ignore[assignment] # as of all recipes, which are mutable

    def _validate(self) -> None:
        if not callable(self.qfactory):
            raise ArgumentTypeError(
                "CustomRecipe.qfactory",
                got=f"a {type(self.qfactory).__name__}",
                accepted="a callable that takes a QuantizerRole or None",
                todo="pass a function, or one of te_hal.quantization.quantizer_factories",
            )
        if self.fp8_format is not Format.HYBRID:
            raise UnsupportedError(
                "CustomRecipe.fp8_format",
                got=str(self.fp8_format),
                accepted=f"Format.HYBRID, {_REFUSED['fp8_format'].reason}",
                todo="leave it out",
            )
        check_key("CustomRecipe.qfactory_key", self.qfactory_key)
        refuse_attention(self, fp8_dpa=self.fp8_dpa, fp8_mha=self.fp8_mha)
        check_backward_override(self, self.backward_override)
        check_number(self, "quantization_alignment", self.quantization_alignment, (int,), 1)

    def mode_of(self, role: str) -> ScalingMode:
        """Refused: quantizers tell.

        Raises:
            StateError: always.
        """
        raise StateError("CustomRecipe", got=f"a question about {role}", accepted="none", todo="ask the quantizers")

    def element_format(self, *, forward: bool) -> ElementFormat:
        """Refused: quantizers tell.

        Raises:
            StateError: always.
        """
        direction = "forward" if forward else "backward"
        raise StateError(
            "CustomRecipe", got=f"a question about {direction}", accepted="none", todo="ask the quantizers"
        )

    def __repr__(self) -> str:
        factory = getattr(self.qfactory, "__qualname__", None) or repr(self.qfactory)
        return (
            f"recipe_type={type(self).__name__}, qfactory={factory}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}, "
            f"backward_override={self.backward_override}, quantization_alignment={self.quantization_alignment}"
        )


def _compared(recipe: CustomRecipe) -> dict[str, object]:
    keyed = recipe.qfactory_key is not None
    return {each.name: getattr(recipe, each.name) for each in fields(recipe) if not (keyed and each.name == "qfactory")}
