"""Fp8Module: what every module with FP8 gemms shares: scaling state, quantizers, weight caches, checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.modules.linear_call import LinearCall, Quantizers
from te_hal.modules.quantized_weights import QuantizedWeights, operand_of
from te_hal.modules.scaling import Asked, build_custom_scaling, build_scaling, take_over, told_apart
from te_hal.modules.scaling_checkpoint import load_scaling, save_scaling
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.modules.weight_cache import WeightCache
from te_hal.quantization import QuantizedTensor
from te_hal.quantization.custom_state import custom_formats
from te_hal.quantization.factory_answers import factory_snapshot
from te_hal.quantization.operand_formats import recipe_formats
from te_hal.quantization.quantizer_role import linear_roles
from te_hal.recipe import CustomRecipe
from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.main_grad import FirstMicrobatch
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_cache import PlanCache
    from te_hal.modules.scaling import Scaling
    from te_hal.quantization import Quantizer
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.observer import QuantizeObserver
    from te_hal.quantization.operand_formats import Formats
    from te_hal.quantization.quantizer_role import QuantizerRole, SlotRoles
    from te_hal.recipe import Recipe
    from te_hal.schema.formats import ColumnwiseOrder
    from te_hal.schema.storage import QuantizedStorage


class Fp8Module(OptionalExtraState, torch.nn.Module):
    """Base of modules that quantize under :class:`te_hal.modules.autocast`.

    Scaling state belongs to the module and its recipe; a module keeps one per family of recipes, so that several may
    be used in turn. A recipe that differs in any field from the one the state was built for (another object, or the
    same one changed) rebuilds the quantizers and drops cached weights; a delayed-scaling state goes along, with its
    scales adapted to a new margin or format.

    Args:
        name: for messages.
        plans: what the module's calls run.

    Attributes:
        num_gemms: products of the module; each has slots of its own in scaling state and quantizers.
        fp8: whether the last forward ran in FP8.
        fp8_initialized: whether scaling state exists.
        fp8_calibration: whether the last forward calibrated.
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

    def __init__(self, name: str | None, plans: PlanCache[Any, Any]) -> None:
        super().__init__()
        self.name = name
        self.fp8 = False
        self.fp8_calibration = False
        self._weight_cache = WeightCache()
        self.quantized_weights = QuantizedWeights()
        self._plans = plans
        self._scaling: dict[str, Scaling] = {}
        self._prepared: Scaling | None = None
        self._in_use: str | None = None
        self._order: ColumnwiseOrder | None = None
        self._observer_of: Callable[[str, int], QuantizeObserver] | None = None
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"recipe": None, "num_gemms": self.num_gemms}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}

    @property
    def label(self) -> str:
        """Class and name, for messages."""
        return type(self).__name__ if self.name is None else f"{type(self).__name__} {self.name!r}"

    @property
    def _fp8_workspaces(self) -> dict[str, QuantizedStorage]:
        return self._weight_cache.storages

    def begin_forward(self, frame: Frame, device: torch.device, order: ColumnwiseOrder) -> None:
        """Bring scaling state and quantizers into line with the autocast in force.

        Args:
            frame: what is in force.
            device: of the input.
            order: memory order in which quantizers lay out columnwise copies.
        """
        if frame.region is not None:
            frame.region.met_module = True
        if self.fp8 is not frame.enabled:  # torch's __setattr__ costs a microsecond
            self.fp8 = frame.enabled
        if self.fp8_calibration is not frame.calibrating:
            self.fp8_calibration = frame.calibrating
        if frame.recipe is None or not (frame.enabled or frame.calibrating):
            return
        self.use_recipe(frame.recipe, device)
        if self._order is not order:
            self._order = order
            # Not set in place: a backward that is still to come belongs to another order.
            self.quantizers = {key: [q.ordered(order) for q in made] for key, made in self.quantizers.items()}

    def formats(self, frame: Frame, device: torch.device, gemm: int = 0) -> Formats | None:
        """What the operands of a product of the module become under the autocast in force; None without FP8.

        A CustomRecipe's factory is asked here, before anything of the module changes.

        Raises:
            ArgumentError: answers of the factory that cannot serve.
        """
        if not frame.enabled or frame.recipe is None:
            return None
        if not isinstance(frame.recipe, CustomRecipe):
            return recipe_formats(frame.recipe)
        return custom_formats(self._custom_scaling(frame.recipe, device).states, gemm)  # type: ignore[arg-type] # custom ones

    def quantizer_roles(self) -> dict[str, SlotRoles]:
        """What a CustomRecipe's factory is asked about, per direction, in slot order."""
        own = self.name or ""
        names = [f"{own}.{gemm}".strip(".") if gemm else own for gemm in self.gemm_names]
        return linear_roles(names, self.output_quantizer_role, self.grad_input_quantizer_role)

    def _custom_scaling(self, recipe: CustomRecipe, device: torch.device) -> Scaling:
        """What is in use if it serves, else what will be."""
        roles = self.quantizer_roles()
        asked = Asked(factory_snapshot(recipe.qfactory), roles)
        for known in (self._scaling.get(recipe.family), self._prepared):
            if known is not None and known.serves(recipe, device, asked):
                return known
        self._prepared = build_custom_scaling(recipe, roles, device, self.label)
        return self._prepared

    def _use_custom_recipe(self, recipe: CustomRecipe, device: torch.device) -> None:
        held, scaling = self._scaling.get(recipe.family), self._custom_scaling(recipe, device)
        if scaling is not held or self._in_use != recipe.family:
            self._say_that_kept_weights_go(recipe)
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
                self._say_that_kept_weights_go(recipe)
                self._install(recipe.family)
            self.fp8_meta["recipe"] = recipe
            return
        self._say_that_kept_weights_go(recipe)
        self._scaling[recipe.family] = build_scaling(recipe, device, held, self.num_gemms)
        self._install(recipe.family)

    def _say_that_kept_weights_go(self, recipe: Recipe) -> None:
        if self._weight_cache.storages and self._in_use is not None:
            before, after = told_apart(self._scaling[self._in_use].recipe, recipe)
            warnings.warn(
                f"{self.label}: weights kept for is_first_microbatch were quantized under {before}; under {after} they "
                "are quantized anew. Keep one recipe until the next first microbatch.",
                stacklevel=2,
            )

    def _install(self, family: str) -> None:
        """Put the state of one family in use."""
        scaling = self._scaling[family]
        self._in_use, self._order = family, None
        self.fp8_meta.update(scaling.states, recipe=scaling.source[0])
        self.quantizers = scaling.make_quantizers()
        if self._observer_of is not None:
            self._attach_observers()
        self.fp8_initialized = True
        self.quantized_weights.bind(self)
        self.clear_weight_caches()

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

    def clear_weight_caches(self) -> None:
        """Drop the quantized weights kept for ``is_first_microbatch``; the next forward makes new ones."""
        self._weight_cache.clear()

    def forget_scaling_state(self) -> None:
        """Start scaling state anew, as for weights that come from elsewhere."""
        self._scaling.clear()
        self._prepared = None
        self._in_use = None
        self.fp8_meta = {"recipe": None, "num_gemms": self.num_gemms}
        self.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8_initialized = False
        self.clear_weight_caches()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Module:
        self.clear_weight_caches()
        self._plans.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

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

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's arguments
        self.clear_weight_caches()
        super()._load_from_state_dict(*args, **kwargs)
        self.quantized_weights.take_over(self, args[0], args[1])

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

    def quantized_weight(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        weight: torch.Tensor,
        plan: LinearPlan,
        is_first_microbatch: bool | None,
        gemm: int = 0,
    ) -> Operand:
        """A weight for the gemms: kept since the first microbatch, or quantized now.

        Args:
            name: under which it is kept.
            parameters: what it was made from; a change of one makes what is kept invalid.
            weight: detached, in the activation dtype; one that lives in FP8 is not quantized again.
            plan: says which copies.
            is_first_microbatch: None: quantize. True: quantize and keep. False: take what is kept, if it fits.
            gemm: number of the product that reads it.
        """
        if isinstance(weight, QuantizedTensor):
            return operand_of(self.label, weight, plan)
        kept = self._weight_cache.get(name, parameters, plan) if is_first_microbatch is False else None
        if kept is not None:
            return kept
        made = plan.copies.weight_made
        operand = self.quantizers["scaling_fwd"][3 * gemm + 1].operand(
            weight,
            rowwise=made.rowwise,
            columnwise=made.columnwise,
            kernels=plan.casts.weight,
        )
        if is_first_microbatch is not None and not isinstance(operand, torch.Tensor):
            self._weight_cache.put(name, operand, parameters, plan)
        return operand

    def calibrate(self, *tensors: torch.Tensor, gemm: int = 0) -> None:
        """Record the amax of what a product reads, input before weight, without quantizing it."""
        for quantizer, tensor in zip(self.quantizers["scaling_fwd"][3 * gemm :], tensors, strict=False):
            quantizer.calibrate(tensor)

    def note_forward(self, frame: Frame) -> None:
        """Have the forward scaling state updated when the region ends, as this forward records an amax in it."""
        state = self.fp8_meta.get("scaling_fwd") if frame.enabled or frame.calibrating else None
        if frame.region is not None and state is not None and state.delayed is not None:
            frame.region.queue.add(state.delayed, forward=True)

    def linear_call(
        self,
        label: str,
        frame: Frame,
        plan: LinearPlan,
        parameter: torch.Tensor,
        first: FirstMicrobatch | None,
        *,
        updates_backward: bool,
        gemm: int = 0,
    ) -> LinearCall:
        """What the autograd Function needs for one product besides tensors.

        Args:
            label: for messages.
            frame: the autocast in force.
            plan: of the product.
            parameter: its weight, as the user holds it.
            first: what its weight gradient belongs to.
            updates_backward: the backward of this product is the last of the module's and may end with an update of
                backward scaling states: it does if it is the first FP8 module of its region.
            gemm: number of the product.
        """
        if not frame.enabled:
            return LinearCall(label, plan, None, parameter, first, None, updates_backward=False)
        region = frame.region
        quantizers = Quantizers.of(self.quantizers, self.fp8_meta["scaling_bwd"], gemm)
        updates = updates_backward and region is not None and region.take_first()
        return LinearCall(label, plan, quantizers, parameter, first, region, updates)
