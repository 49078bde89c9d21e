"""Fp8Module: what every module with FP8 gemms shares: scaling state, quantizers, weight caches, checkpoints."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.state_dict import OptionalExtraState
from te_hal.quantization import extra_state
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.scaling_state import (
    BACKWARD_ROLES,
    FORWARD_ROLES,
    DelayedScalingState,
    ScalingState,
    make_scaling_state,
)
from te_hal.recipe import DelayedScaling, Format, Recipe
from te_hal.schema.errors import CheckpointError, TeHalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.quantization import Quantizer
    from te_hal.quantization.autocast import Frame
    from te_hal.schema.storage import QuantizedStorage

_DIRECTIONS = (("scaling_fwd", FORWARD_ROLES, True), ("scaling_bwd", BACKWARD_ROLES, False))
_ARRAYS = {"scaling_fwd": ("scale_fwd", "amax_history_fwd"), "scaling_bwd": ("scale_bwd", "amax_history_bwd")}


class Fp8Module(OptionalExtraState, torch.nn.Module):
    """Base of modules that quantize under :class:`te_hal.modules.autocast`.

    Scaling state belongs to the module and its recipe. A recipe that differs in any field from the one the state
    was built for (another object, or the same one changed) rebuilds the quantizers and drops cached weights; a
    delayed-scaling history goes along, with its scales adapted to a new margin or format.

    Attributes:
        fp8: whether the last forward ran in FP8.
        fp8_initialized: whether scaling state exists.
        fp8_calibration: whether the last forward calibrated.
        fp8_meta: ``recipe``, ``scaling_fwd``, ``scaling_bwd`` (with ``scale`` and ``amax_history`` under delayed
            scaling), ``num_gemms``.
        quantizers: ``scaling_fwd`` and ``scaling_bwd``, each a list in slot order.
    """

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"recipe": None, "num_gemms": 1}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._states: dict[type[Recipe], dict[str, ScalingState]] = {}
        self._built_for: Recipe | None = None
        self._fp8_workspaces: dict[str, QuantizedStorage] = {}
        self._plans: dict[object, Any] = {}

    @property
    def label(self) -> str:
        """Class and name, for messages."""
        return type(self).__name__ if self.name is None else f"{type(self).__name__} {self.name!r}"

    def begin_forward(self, device: torch.device) -> Frame:
        """Take note of the autocast in force and bring scaling state and quantizers into line with its recipe."""
        frame = current_frame()
        self.fp8, self.fp8_calibration = frame.enabled, frame.calibrating
        if frame.recipe is not None and (frame.enabled or frame.calibrating):
            self._use_recipe(frame.recipe, device)
        return frame

    def _use_recipe(self, recipe: Recipe, device: torch.device) -> None:
        states = self._states.get(type(recipe))
        if recipe == self._built_for and states is not None and _lives_on(states, device):
            for state in states.values():
                state.recipe = recipe  # type: ignore[assignment] # of the state's own class
            self.fp8_meta["recipe"] = recipe
            return
        made = {
            key: make_scaling_state(recipe, roles, forward=forward, device=device)
            for key, roles, forward in _DIRECTIONS
        }
        if states is not None:
            _carry_over(states, made)
        self._install(recipe, made)

    def _install(self, recipe: Recipe, states: dict[str, ScalingState]) -> None:
        self._states[type(recipe)] = states
        self._built_for = copy.copy(recipe)
        self.fp8_meta.update(states, recipe=recipe)
        self.quantizers = {key: state.make_quantizers() for key, state in states.items()}
        self.fp8_initialized = True
        self.clear_weight_caches()
        self._plans.clear()

    def clear_weight_caches(self) -> None:
        """Drop the quantized weights kept for ``is_first_microbatch``; the next forward makes new ones."""
        self._fp8_workspaces.clear()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Module:
        self.clear_weight_caches()
        self._plans.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Plans hold kernels of this process, and caches are remade: neither is pickled or copied."""
        return {**self.__dict__, "_plans": {}, "_fp8_workspaces": {}}

    def get_extra_state(self) -> torch.Tensor:
        """Scaling state as a CPU uint8 tensor (quantization.extra_state); of no elements when the recipe has none."""
        states = self._states.get(DelayedScaling) if isinstance(self._built_for, DelayedScaling) else None
        if states is None or self._built_for is None:
            return extra_state.empty()
        arrays: dict[str, torch.Tensor] = {}
        for key, (scale, history) in _ARRAYS.items():
            arrays[scale] = states[key].scale  # type: ignore[union-attr] # delayed
            arrays[history] = states[key].amax_history  # type: ignore[union-attr]
        return extra_state.pack(extra_state.SavedState("DelayedScaling", self._built_for.settings(), arrays))

    def set_extra_state(self, state: object) -> None:
        """Take over saved scaling state; zero bytes (or None) start it anew.

        Raises:
            CheckpointError: not written by te_hal, cut short, altered, or of another shape.
        """
        saved = None if state is None else extra_state.unpack(state, self.label)
        if saved is None:
            self.forget_scaling_state()
            return
        recipe = _saved_recipe(saved, self.label)
        made = {}
        for key, roles, forward in _DIRECTIONS:
            fresh = DelayedScalingState(recipe, roles, forward=forward, device=torch.device("cpu"))
            fresh.adopt(*_checked_arrays(saved, key, fresh, self.label))
            made[key] = fresh
        self._states.clear()
        self._install(recipe, made)  # type: ignore[arg-type] # dict is invariant

    def forget_scaling_state(self) -> None:
        """Start scaling state anew, as for weights that come from elsewhere."""
        self._states.clear()
        self._built_for = None
        self.fp8_meta = {"recipe": None, "num_gemms": 1}
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_initialized = False
        self.clear_weight_caches()


def _lives_on(states: dict[str, ScalingState], device: torch.device) -> bool:
    return all(not isinstance(s, DelayedScalingState) or s.scale.device == device for s in states.values())


def _carry_over(old: dict[str, ScalingState], new: dict[str, ScalingState]) -> None:
    """Keep histories; adapt scales to another margin or format (exact: the factor is a power of two)."""
    for key, state in new.items():
        before = old[key]
        if isinstance(state, DelayedScalingState) and isinstance(before, DelayedScalingState):
            state.adopt(before.scale, before.amax_history)
            factor = state.numerator / before.numerator
            if factor != 1.0:
                came_from_history = before.amax_history[1:].amax(dim=0).to(state.scale.device) > 0
                state.scale.copy_(torch.where(came_from_history, state.scale * factor, state.scale))


def _saved_recipe(saved: extra_state.SavedState, label: str) -> DelayedScaling:
    """The saved recipe, as far as it can be written down: a callable becomes the default until autocast brings one."""
    if saved.recipe != "DelayedScaling":
        raise CheckpointError(
            f"{label}: _extra_state", got=f"recipe {saved.recipe}", accepted="DelayedScaling", todo="remove the entry"
        )
    fields = {k: v for k, v in saved.fields.items() if not (isinstance(v, str) and v.startswith("callable "))}
    try:
        return DelayedScaling(**{**fields, "fp8_format": Format[fields["fp8_format"]]})
    except (KeyError, TypeError, TeHalError) as error:
        raise CheckpointError(
            f"{label}: _extra_state",
            got=f"recipe fields {saved.fields}",
            accepted="fields of DelayedScaling",
            todo="save again with this version",
        ) from error


def _checked_arrays(
    saved: extra_state.SavedState, key: str, fresh: DelayedScalingState, label: str
) -> tuple[torch.Tensor, torch.Tensor]:
    scale_name, history_name = _ARRAYS[key]
    wanted = {scale_name: tuple(fresh.scale.shape), history_name: tuple(fresh.amax_history.shape)}
    for name, shape in wanted.items():
        got = tuple(saved.arrays[name].shape) if name in saved.arrays else None
        if got != shape:
            raise CheckpointError(
                f"{label}: _extra_state",
                got=f"{name} of shape {got}",
                accepted=f"shape {shape}",
                todo="load a checkpoint of the same module",
            )
    return saved.arrays[scale_name], saved.arrays[history_name]
