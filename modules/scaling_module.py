"""ScalingModule: a module's scaling state and quantizers, by recipe: made, adapted, observed, saved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.modules.label import Labelled
from te_hal.modules.scaling import Asked, build_custom_scaling, build_scaling, factory_of, quantizes_alike, take_over
from te_hal.modules.scaling_checkpoint import load_scaling, save_scaling
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.quantization.quantizer_role import linear_roles
from te_hal.recipe import CustomRecipe
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.modules.scaling import Scaling
    from te_hal.quantization import Quantizer
    from te_hal.quantization.observer import QuantizeObserver
    from te_hal.quantization.quantizer_role import QuantizerRole, SlotRoles
    from te_hal.quantization.scaling_state import DelayedScalingState
    from te_hal.recipe import Recipe
    from te_hal.schema.formats import ColumnwiseOrder


class ScalingModule(Labelled, OptionalExtraState, torch.nn.Module):
    """Base of modules that own scaling state.

    State belongs to the module and its recipe; a module keeps one per family of recipes, so that several may be used
    in turn. A recipe that differs in any field from the one the state was built for (another object, or the same one
    changed) rebuilds the quantizers; a delayed-scaling state goes along, with its scales adapted to a new margin or
    format. What was quantized under the recipe before is told by :meth:`leave_recipe` and :meth:`enter_recipe`.

    Args:
        name: for messages.

    Attributes:
        num_gemms: products of the module; each has slots of its own in scaling state and quantizers.
        fp8_initialized: whether scaling state exists.
        fp8_meta: ``recipe``, ``scaling_fwd``, ``scaling_bwd`` (with ``scale`` and ``amax_history`` under delayed
            scaling), ``num_gemms``.
        quantizers: ``scaling_fwd`` and ``scaling_bwd``, each a list in slot order.
    """

    num_gemms: ClassVar[int] = 1

    #: Names of the products for a CustomRecipe's factory, behind the module's own.
    gemm_names: ClassVar[tuple[str, ...]] = ("",)

    #: For a CustomRecipe's factory: role of the output, and of the gradient of the input, in the module that reads it.
    output_quantizer_role: QuantizerRole | None = None
    grad_input_quantizer_role: QuantizerRole | None = None

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        self._scaling: dict[str, Scaling] = {}
        self._prepared: Scaling | None = None
        self._in_use: str | None = None
        self._order: ColumnwiseOrder | None = None
        self._observer_of: Callable[[str, int], QuantizeObserver] | None = None
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"recipe": None, "num_gemms": self.num_gemms}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Transformer Engine's other name for ``fp8_initialized``."""
        return self.fp8_initialized

    def leave_recipe(self, before: Recipe | None, after: Recipe) -> None:
        """Hook: quantizers of another recipe, or of the same one changed, are about to be in use.

        Args:
            before: as it was when the state in use was built; None where there is none.
            after: the user's object.
        """

    def enter_recipe(self) -> None:
        """Hook: other quantizers are in use, or none at all."""

    def quantizer_roles(self) -> dict[str, SlotRoles]:
        """What a CustomRecipe's factory is asked about, per direction, in slot order."""
        own = self.name or ""
        names = [f"{own}.{gemm}".strip(".") if gemm else own for gemm in self.gemm_names]
        return linear_roles(names, self.output_quantizer_role, self.grad_input_quantizer_role)

    def _custom_scaling(self, recipe: CustomRecipe, device: torch.device) -> Scaling:
        """What is in use if it serves, else what will be."""
        roles = self.quantizer_roles()
        asked = Asked(factory_of(recipe), roles)
        for known in (self._scaling.get(recipe.family), self._prepared):
            if known is not None and known.serves(recipe, device, asked):
                return known
        held = self._scaling.get(recipe.family)
        made = build_custom_scaling(recipe, roles, device, self.label)
        if held is not None and quantizes_alike(held, made, device):
            # A factory that keeps a record changes with every question, its answers do not.
            self._scaling[recipe.family] = made = replace(made, states=held.states)
        else:
            self._prepared = made
        return made

    def _use_custom_recipe(self, recipe: CustomRecipe, device: torch.device) -> None:
        scaling = self._custom_scaling(recipe, device)
        held = self._scaling.get(recipe.family)
        if scaling is not held or self._in_use != recipe.family:
            self._leave_recipe(recipe)
        if scaling is not held:
            take_over(scaling, held, device)
            self._scaling[recipe.family], self._prepared = scaling, None
        if scaling is not held or self._in_use != recipe.family:
            self._install(recipe.family)
        self.fp8_meta["recipe"] = recipe

    def use_recipe(self, recipe: Recipe, device: torch.device) -> None:
        """Have scaling state and quantizers of this recipe in use, made anew where there are none that fit."""
        if isinstance(recipe, CustomRecipe):
            self._use_custom_recipe(recipe, device)
            return
        held = self._scaling.get(recipe.family)
        if held is not None and held.serves(recipe, device):
            if held.source[0] is not recipe:
                self._scaling[recipe.family] = replace(held, source=(recipe, recipe.version))
            if self._in_use != recipe.family:
                self._leave_recipe(recipe)
                self._install(recipe.family)
            self.fp8_meta["recipe"] = recipe
            return
        self._leave_recipe(recipe)
        self._scaling[recipe.family] = build_scaling(recipe, device, held, self.num_gemms)
        self._install(recipe.family)

    def _leave_recipe(self, after: Recipe) -> None:
        self.leave_recipe(None if self._in_use is None else self._scaling[self._in_use].recipe, after)

    def _install(self, family: str) -> None:
        """Put the state of one family in use."""
        scaling = self._scaling[family]
        self._in_use, self._order = family, None
        self.fp8_meta.update(scaling.states, recipe=scaling.source[0])
        self.quantizers = scaling.make_quantizers()
        if self._observer_of is not None:
            self._attach_observers()
        self.fp8_initialized = True
        self.enter_recipe()

    def observe_quantizers(self, observer_of: Callable[[str, int], QuantizeObserver] | None) -> None:
        """Have every quantizer of this module observed, also those that are made later.

        Args:
            observer_of: gives the observer for a key of ``quantizers`` and a slot; None: nobody observes any more.

        Raises:
            StateError: somebody else observes this module.
        """
        if observer_of is not None and self._observer_of is not None:
            raise StateError(
                f"{self.label}: observer",
                got="a module that is observed already",
                accepted="one observer at a time",
                todo="close() the monitor before",
            )
        self._observer_of = observer_of
        self._attach_observers()

    def _attach_observers(self) -> None:
        observer_of = self._observer_of
        for key, made in self.quantizers.items():
            for slot, quantizer in enumerate(made):
                quantizer.observer = None if observer_of is None else observer_of(key, slot)

    def delayed_states(self) -> Iterator[tuple[str, DelayedScalingState]]:
        """Delayed-scaling states by direction, those of recipes that are not in use included."""
        for scaling in self._scaling.values():
            yield from scaling.delayed_states().items()

    @property
    def has_scaling_state(self) -> bool:
        """Whether there is any, that of a CustomRecipe included which was loaded and waits for its factory."""
        return bool(self._scaling)

    def forget_scaling_state(self) -> None:
        """Start scaling state anew, as for weights that come from elsewhere."""
        self._scaling.clear()
        self._prepared = None
        self._in_use = None
        self.fp8_meta = {"recipe": None, "num_gemms": self.num_gemms}
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_initialized = False
        self.enter_recipe()

    def __getstate__(self) -> dict[str, Any]:
        """Quantizers, which share memory with the scaling state, are neither pickled nor copied but made anew.

        A copy is observed by nobody.
        """
        return {**self.__dict__, "quantizers": {}, "_observer_of": None, "_prepared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickled or copied state; quantizers are made anew over its scaling state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        if self._in_use is not None:
            self._install(self._in_use)

    def get_extra_state(self) -> torch.Tensor:
        """Delayed-scaling state as a CPU uint8 tensor (quantization.extra_state); of no elements without any.

        It is saved also while a recipe without state is in use.
        """
        return save_scaling(self._scaling, self._in_use)

    def check_extra_state(self, state: object) -> None:
        """Refuse what :meth:`set_extra_state` would refuse, and change nothing.

        Raises:
            CheckpointError: as there.
        """
        if state is not None:
            load_scaling(state, self.label, self.num_gemms)

    def set_extra_state(self, state: object) -> None:
        """Take over saved scaling state, te_hal's or Transformer Engine's; zero bytes (or None) start it anew.

        Raises:
            CheckpointError: written by neither, cut short, altered, or of another shape.
        """
        loaded = None if state is None else load_scaling(state, self.label, self.num_gemms)
        self.forget_scaling_state()
        if loaded is not None:
            self._scaling[loaded.recipe.family] = loaded
            if not loaded.recipe.custom():  # which waits for its factory
                self._install(loaded.recipe.family)
