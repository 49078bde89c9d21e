"""Ready factories for CustomRecipe: the quantizers of a built-in recipe with its defaults, and mixtures of two.

Start from one of them to change single roles::

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return te.IdentityQuantizer()
        return quantizer_factories.mxfp8_factory(role)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.hybrid_quantizer import HybridQuantizer
from te_hal.quantization.quantizer_request import DelayedScalingRequest
from te_hal.quantization.recipe_quantizers import make_quantizer
from te_hal.quantization.unquantized import IdentityQuantizer
from te_hal.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantizer_factory,
)
from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.quantization.quantizer import Quantizer
    from te_hal.quantization.quantizer_role import QuantizerRole
    from te_hal.recipe import Recipe


@quantizer_factory(key=("te_hal.high_precision_factory", 1))
def high_precision_factory(role: QuantizerRole | None) -> Quantizer:  # noqa: ARG001 - all roles alike
    """Nothing is quantized."""
    return IdentityQuantizer()


@quantizer_factory(key=("te_hal.delayed_scaling_factory", 1))
def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:  # noqa: ARG001
    """DelayedScaling."""
    return DelayedScalingRequest()


@quantizer_factory(key=("te_hal.current_scaling_factory", 1))
def current_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Float8CurrentScaling: E5M2 for grad_output, E4M3 for the rest."""
    return _of(Float8CurrentScaling(), role)


@quantizer_factory(key=("te_hal.float8_block_scaling_factory", 1))
def float8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """Float8BlockScaling."""
    return _of(Float8BlockScaling(), role)


@quantizer_factory(key=("te_hal.mxfp8_factory", 1))
def mxfp8_factory(role: QuantizerRole | None) -> Quantizer:
    """MXFP8BlockScaling."""
    return _of(MXFP8BlockScaling(), role)


@quantizer_factory(key=("te_hal.mtfp8_block_scaling_factory", 1))
def mtfp8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """MTFP8BlockScaling."""
    return _of(MTFP8BlockScaling(), role)


@quantizer_factory(key=("te_hal.nvfp4_factory", 1))
def nvfp4_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4BlockScaling."""
    return _of(NVFP4BlockScaling(), role)


@quantizer_factory(key=("te_hal.nvfp4_1d_weight_factory", 1))
def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4BlockScaling with a scale per 16 neighbours in weights too."""
    return _of(NVFP4BlockScaling(disable_2d_quantization=True), role)


@quantizer_factory(key=("te_hal.high_precision_fwd_mxfp8_bwd_factory", 1))
def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward unquantized; dgrad and wgrad in MXFP8."""
    return _mixed(role, IdentityQuantizer(), mxfp8_factory)


@quantizer_factory(key=("te_hal.mxfp8_fwd_high_precision_bwd_factory", 1))
def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8; dgrad and wgrad unquantized."""
    return _mixed(role, mxfp8_factory(role), high_precision_factory)


@quantizer_factory(key=("te_hal.mxfp8_fwd_nvfp4_bwd_factory", 1))
def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8; dgrad and wgrad in NVFP4."""
    return _mixed(role, mxfp8_factory(role), nvfp4_factory)


@quantizer_factory(key=("te_hal.nvfp4_linear_fp8_dpa_factory", 1))
def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4BlockScaling for linear products; attention in FP8 is refused.

    Raises:
        UnsupportedError: a role of attention.
    """
    if role is not None and role.module_type == "dpa":
        raise _refused("nvfp4_linear_fp8_dpa_factory", str(role), "linear products: no backend has FP8 attention")
    return nvfp4_factory(role)


@quantizer_factory(key=("te_hal.nvfp4_row_scaled_fwd_mxfp8_bwd_factory", 1))
def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Refused: no op has NVFP4 with a scale per row.

    Raises:
        UnsupportedError: always.
    """
    raise _refused("nvfp4_row_scaled_fwd_mxfp8_bwd_factory", str(role), "a factory without scales per row")


@quantizer_factory(key=("te_hal.nvfp4_row_scaled_fwd_high_precision_bwd_factory", 1))
def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Refused: no op has NVFP4 with a scale per row.

    Raises:
        UnsupportedError: always.
    """
    raise _refused("nvfp4_row_scaled_fwd_high_precision_bwd_factory", str(role), "a factory without scales per row")


def _mixed(
    role: QuantizerRole | None, forward: Quantizer, backward: Callable[[QuantizerRole | None], Quantizer]
) -> Quantizer:
    """Inputs and weights by two quantizers; gradients by the backward's, the rest by the forward's."""
    tensor_type = "" if role is None else role.tensor_type
    if tensor_type in ("input", "weight"):
        return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=backward(role))
    return backward(role) if tensor_type.startswith("grad") else forward


def _refused(name: str, got: str, accepted: str) -> UnsupportedError:
    return UnsupportedError(
        f"quantizer_factories.{name}",
        got=got,
        accepted=accepted,
        todo="use nvfp4_factory, or one of MXFP8",
    )


def _of(recipe: Recipe, role: QuantizerRole | None) -> Quantizer:
    """The recipe's quantizer of a role; one that is not known gets that of an input."""
    return make_quantizer(recipe, "input" if role is None or not role.tensor_type else role.tensor_type)
