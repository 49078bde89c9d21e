"""Scaling state of one module and direction: what a recipe keeps between steps, and the quantizers it feeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import te_hal.ops
from te_hal.quantization.current_scaling_quantizer import Float8CurrentScalingQuantizer
from te_hal.quantization.float8_quantizer import Float8Quantizer
from te_hal.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.quantization.quantizer import Quantizer
    from te_hal.recipe import QParams

#: Tensor roles by direction, in slot order; Transformer Engine's order.
FORWARD_ROLES = ("input", "weight", "output")
BACKWARD_ROLES = ("grad_output", "grad_input")


class DelayedScalingState:
    """Scales and amax histories of ``n`` tensors (docs/numerics.md, D1-D5).

    Args:
        recipe: the recipe; kept by reference, so that its margin and algorithm are those of the moment.
        roles: the role of each slot.
        forward: direction.
        device: where the state lives.

    Attributes:
        scale: fp32 ``[n]``, starts at 1.
        amax_history: fp32 ``[amax_history_len, n]``, starts at 0. Row 0 is the running amax.
        numerator: what amax divides to give a scale, by the margin and format the state was built for.
    """

    def __init__(self, recipe: DelayedScaling, roles: Sequence[str], *, forward: bool, device: torch.device) -> None:
        self.recipe = recipe
        self.roles = tuple(roles)
        self.forward = forward
        self.format = recipe.element_format(forward=forward)
        self.numerator = self.format.max * 2.0**-recipe.margin
        self.scale = torch.ones(len(roles), dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, len(roles), dtype=torch.float32, device=device)

    def adopt(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Take over another state's values; a longer history keeps its newest rows, a shorter one gets zeros.

        The newest past amax stands in the last row, the running one in row 0: both are kept.
        """
        self.scale.copy_(scale)
        rows, wanted = amax_history.shape[0], self.amax_history.shape[0]
        self.amax_history.zero_()
        self.amax_history[0] = amax_history[0]
        kept = min(rows, wanted) - 1
        if kept:
            self.amax_history[wanted - kept :] = amax_history[rows - kept :]

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per slot; they share this state's memory."""
        return [
            Float8Quantizer(self.scale[slot : slot + 1], self.amax_history[0, slot : slot + 1], self.format.dtype)
            for slot in range(len(self.roles))
        ]

    def update(self) -> None:
        """Roll the history and renew the scales, in place."""
        recipe = self.recipe
        if isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None:
            te_hal.ops.update_delayed_scale(
                self.amax_history,
                self.scale,
                fp8_max=self.format.max,
                margin=recipe.margin,
                amax_compute_algo=recipe.amax_compute_algo,
            )
        else:
            self._update_with_callables()

    def _update_with_callables(self) -> None:
        """Transformer Engine's rule for a user's callables: the history rolls every time, also for a zero amax."""
        recipe, history = self.recipe, self.amax_history
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(history)
        elif recipe.amax_compute_algo == "max":
            amax = history.amax(dim=0)
        else:
            amax = history[0].clone()
        if recipe.scaling_factor_compute_algo is not None:
            scale = recipe.scaling_factor_compute_algo(amax, self.scale, self.format.max, recipe)
        else:
            scale = self._default_scale(amax)
        history.copy_(history.roll(-1, 0))
        history[0] = 0.0
        self.scale.copy_(scale)

    def _default_scale(self, amax: torch.Tensor) -> torch.Tensor:
        numerator = torch.full_like(amax, self.numerator)
        scale = (numerator / amax).clamp(max=FLOAT32_MAX)
        return torch.where((amax > 0) & torch.isfinite(amax), scale, self.scale)


class CurrentScalingState:
    """What current scaling keeps between steps: nothing. Makes the quantizers of one module and direction."""

    def __init__(self, recipe: Float8CurrentScaling, roles: Sequence[str], *, forward: bool) -> None:
        self.recipe = recipe
        self.roles = tuple(roles)
        self.forward = forward
        self.format = recipe.element_format(forward=forward)

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per slot, with the settings of its role."""
        return [self._quantizer(self._qparams(role)) for role in self.roles]

    def _qparams(self, role: str) -> QParams:
        recipe = self.recipe
        if not self.forward:
            return recipe.fp8_quant_bwd_grad
        return recipe.fp8_quant_fwd_weight if role == "weight" else recipe.fp8_quant_fwd_inp

    def _quantizer(self, qparams: QParams) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            self.format.dtype, force_pow_2_scales=qparams.power_2_scale, amax_epsilon=qparams.amax_epsilon
        )


ScalingState = DelayedScalingState | CurrentScalingState


def make_scaling_state(recipe: Recipe, roles: Sequence[str], *, forward: bool, device: torch.device) -> ScalingState:
    """The state that a recipe needs for one module and direction.

    Raises:
        UnsupportedError: no state is built for this recipe.
    """
    if isinstance(recipe, DelayedScaling):
        return DelayedScalingState(recipe, roles, forward=forward, device=device)
    if isinstance(recipe, Float8CurrentScaling):
        return CurrentScalingState(recipe, roles, forward=forward)
    raise UnsupportedError(
        "scaling state",
        got=f"recipe {type(recipe).__name__}",
        accepted="DelayedScaling, Float8CurrentScaling",
        todo="use one of these",
    )
