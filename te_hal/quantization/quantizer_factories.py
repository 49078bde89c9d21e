"""Ready factories for CustomRecipe: each gives the quantizers of a built-in recipe with its defaults.

Start from one of them to change single roles::

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return te.IdentityQuantizer()
        return quantizer_factories.mxfp8_factory(role)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.quantizer_request import DelayedScalingRequest
from te_hal.quantization.recipe_quantizers import make_quantizer
from te_hal.quantization.unquantized import IdentityQuantizer
from te_hal.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.quantization.quantizer_role import QuantizerRole
    from te_hal.recipe import Recipe


def high_precision_factory(role: QuantizerRole | None) -> Quantizer:  # noqa: ARG001 - all roles alike
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:  # noqa: ARG001
    """DelayedScaling."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Float8CurrentScaling: E5M2 for grad_output, E4M3 for the rest."""
    return _of(Float8CurrentScaling(), role)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Float8BlockScaling."""
    return _of(Float8BlockScaling(), role)


def mxfp8_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8BlockScaling."""
    return _of(MXFP8BlockScaling(), role)


def mtfp8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """MTFP8BlockScaling."""
    return _of(MTFP8BlockScaling(), role)


def nvfp4_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4BlockScaling."""
    return _of(NVFP4BlockScaling(), role)


def _of(recipe: Recipe, role: QuantizerRole | None) -> Quantizer:
    """The recipe's quantizer of a role; one that is not known gets that of an input."""
    return make_quantizer(recipe, "input" if role is None or not role.tensor_type else role.tensor_type)
