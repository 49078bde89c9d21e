"""Scaling state of one module and direction: what a recipe keeps between steps, and the quantizers it feeds."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

import te_hal.ops
from te_hal.quantization.float8_quantizer import Float8Quantizer
from te_hal.quantization.operand_formats import override_of
from te_hal.quantization.recipe_quantizers import STATELESS, make_quantizer
from te_hal.quantization.unquantized import IdentityQuantizer
from te_hal.quantization.updates import Rolling
from te_hal.recipe import CustomRecipe, DelayedScaling, Recipe
from te_hal.schema.errors import ArgumentError, StateError, UnsupportedError
from te_hal.schema.formats import FLOAT32_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.quantization.quantizer import Quantizer

#: Tensor roles by direction, in slot order; Transformer Engine's order.
FORWARD_ROLES = ("input", "weight", "output")
BACKWARD_ROLES = ("grad_output", "grad_input")


class DelayedScalingState:
    """Scales and amax histories of ``n`` tensors (docs/numerics.md, D1-D5).

    Args:
        recipe: the recipe; copied, so a change of the object counts from the :meth:`adapt` that brings it.
        roles: the role of each slot.
        forward: direction.
        device: where the state lives.

    Attributes:
        scale: fp32 ``[n]``, starts at 1.
        amax_history: fp32 ``[amax_history_len, n]``, starts at 0. Row 0 is the running amax.
    """

    def __init__(self, recipe: DelayedScaling, roles: Sequence[str], *, forward: bool, device: torch.device) -> None:
        self.recipe = copy.copy(recipe)
        self.roles = tuple(roles)
        self.forward = forward
        self.format = recipe.element_format(forward=forward)
        self._shape = torch.Size([len(roles)])
        with torch.inference_mode(mode=False):  # later steps write to these outside of it
            self.scale = torch.ones(len(roles), dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(recipe.amax_history_len, len(roles), dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.scale.device

    @property
    def delayed(self) -> DelayedScalingState:
        """The state that rolls: this one."""
        return self

    def load(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Take over saved values of the same shapes, in place."""
        self.scale.copy_(scale)
        self.amax_history.copy_(amax_history)

    def adapt(self, recipe: DelayedScaling, device: torch.device) -> None:
        """Go over to another recipe and device, values included; quantizers made before keep what they had.

        A shorter history keeps its newest rows, a longer one gets zeros before them. Scales that came from an amax
        follow the margin and the format: their factor is a power of two, so nothing is rounded.
        """
        with torch.inference_mode(mode=False):
            self._rescale(recipe)
            self._resize(recipe.amax_history_len)
            self._move(device)
        self.recipe = copy.copy(recipe)
        self.format = recipe.element_format(forward=self.forward)

    def _move(self, device: torch.device) -> None:
        """What lived on the meta device has no values and starts anew."""
        if self.device.type == "meta" and device.type != "meta":
            self.scale = torch.ones_like(self.scale, device=device)
            self.amax_history = torch.zeros_like(self.amax_history, device=device)
        self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)

    def _rescale(self, recipe: DelayedScaling) -> None:
        before = _largest_scaled(self.recipe, forward=self.forward)
        factor = _largest_scaled(recipe, forward=self.forward) / before
        if factor != 1.0:
            past = self.amax_history[1:]
            # A scale that no amax has moved yet is 1 under every margin and format.
            moved = (self.scale != 1.0) | ((past > 0) & torch.isfinite(past)).any(dim=0)
            adapted = (self.scale * factor).clamp(max=FLOAT32_MAX)
            self.scale = torch.where(moved, adapted, self.scale)

    def _resize(self, wanted: int) -> None:
        """The running amax stands in row 0 and the newest past one in the last row: both are kept."""
        before = self.amax_history
        rows = before.shape[0]
        if rows != wanted:
            kept = min(rows, wanted) - 1
            self.amax_history = before.new_zeros(wanted, before.shape[1])
            self.amax_history[0] = before[0]
            self.amax_history[wanted - kept :] = before[rows - kept :]

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per slot; they share this state's memory."""
        with torch.inference_mode(mode=False):
            return [
                Float8Quantizer(self.scale[slot : slot + 1], self.amax_history[0, slot : slot + 1], self.format.dtype)
                for slot in range(len(self.roles))
            ]

    def update(self) -> None:
        """Roll the history and renew the scales, in place."""
        rolling = self.rolling()
        if rolling is not None:
            history, scale, fp8_max, margin, algo = rolling
            te_hal.ops.update_delayed_scale(history, scale, fp8_max=fp8_max, margin=margin, amax_compute_algo=algo)
        else:
            self._update_with_callables()

    def rolling(self) -> Rolling | None:
        """What an op takes to roll this state, maybe with others; None where a user's callables must.

        Raises:
            StateError: scale or amax_history was replaced by what does not fit.
        """
        recipe, history, scale = self.recipe, self.amax_history, self.scale
        algo = recipe.amax_compute_algo
        if not recipe.updates_by_op or not isinstance(algo, str):
            return None
        # Kernels that are bound check nothing.
        fits = history.dtype is scale.dtype is torch.float32 and history.shape[1:] == scale.shape == self._shape
        if not fits or history.device != scale.device:
            raise _replaced(history, scale, len(self.roles))
        return Rolling(history, scale, self.format.max, recipe.margin, algo)

    def _update_with_callables(self) -> None:
        """Transformer Engine's rule for a user's callables: the history rolls every time, also for a zero amax.

        Callables get copies, and their results are checked before anything is written: an error changes nothing.
        """
        recipe, history = self.recipe, self.amax_history
        if callable(recipe.amax_compute_algo):
            amax = self._checked(recipe.amax_compute_algo(history.clone()), "amax_compute_algo")
        elif recipe.amax_compute_algo == "max":
            amax = history.amax(dim=0)
        else:
            amax = history[0].clone()
        if recipe.scaling_factor_compute_algo is not None:
            scale = recipe.scaling_factor_compute_algo(amax, self.scale.clone(), self.format.max, recipe)
            scale = self._checked(scale, "scaling_factor_compute_algo")
        else:
            scale = self._default_scale(amax)
        self.scale.copy_(scale)
        history.copy_(history.roll(-1, 0))
        history[0] = 0.0

    def _default_scale(self, amax: torch.Tensor) -> torch.Tensor:
        numerator = torch.full_like(amax, _largest_scaled(self.recipe, forward=self.forward))
        scale = (numerator / amax).clamp(max=FLOAT32_MAX)
        return torch.where((amax > 0) & torch.isfinite(amax), scale, self.scale)

    def _checked(self, result: object, name: str) -> torch.Tensor:
        wanted = tuple(self.scale.shape)
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != wanted:
            raise ArgumentError(
                f"DelayedScaling.{name}",
                got=f"a result of shape {tuple(result.shape)}"
                if isinstance(result, torch.Tensor)
                else f"a {type(result).__name__} as result",
                accepted=f"a tensor of shape {wanted}, one value per tensor of the module",
                todo="reduce over dim 0 of the history only",
            )
        return result.detach().to(self.scale)


def _replaced(history: torch.Tensor, scale: torch.Tensor, count: int) -> StateError:
    return StateError(
        "DelayedScalingState",
        got=f"amax_history of {history.dtype}, {tuple(history.shape)}, scale of {scale.dtype}, {tuple(scale.shape)}",
        accepted=f"torch.float32, [amax_history_len, {count}] and [{count}]",
        todo="write to the state's tensors in place, or load(scale, amax_history)",
    )


def _largest_scaled(recipe: DelayedScaling, *, forward: bool) -> float:
    """What amax divides to give a scale (docs/numerics.md, D3)."""
    return recipe.element_format(forward=forward).max * 2.0**-recipe.margin


class StatelessScalingState:
    """What the other recipes keep between steps: nothing. Makes the quantizers of one module and direction."""

    def __init__(self, recipe: Recipe, roles: Sequence[str], *, forward: bool) -> None:
        self.recipe = recipe
        self.roles = tuple(roles)
        self.forward = forward
        self.delayed = None

    def adapt(self, recipe: Recipe, device: torch.device) -> None:  # noqa: ARG002 - there is nothing to move
        """Go over to another recipe."""
        self.recipe = recipe

    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer per slot, with the settings of its role; gradients stay plain under a backward_override."""
        if not self.forward and override_of(self.recipe) is not None:
            return [IdentityQuantizer() for _ in self.roles]
        return [make_quantizer(self.recipe, role) for role in self.roles]


ScalingState = DelayedScalingState | StatelessScalingState


def check_is_built(recipe: Recipe) -> None:
    """Refuse a recipe that has no scaling state here.

    Raises:
        UnsupportedError: neither one of te_hal.recipe nor derived from one.
    """
    if not isinstance(recipe, (DelayedScaling, *STATELESS, CustomRecipe)):
        raise UnsupportedError(
            "autocast",
            got=f"recipe {type(recipe).__name__}",
            accepted=f"{', '.join(kind.__name__ for kind in (DelayedScaling, *STATELESS, CustomRecipe))} and classes"
            " derived from them",
            todo="derive from one of these",
        )


def make_scaling_state(recipe: Recipe, roles: Sequence[str], *, forward: bool, device: torch.device) -> ScalingState:
    """The state that a recipe needs for one module and direction; CustomRecipe's is CustomScalingState.

    Raises:
        UnsupportedError: no state is built for this recipe.
    """
    check_is_built(recipe)
    if isinstance(recipe, DelayedScaling):
        return DelayedScalingState(recipe, roles, forward=forward, device=device)
    return StatelessScalingState(recipe, roles, forward=forward)
