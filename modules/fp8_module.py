"""Fp8Module: what every module with FP8 gemms shares: what a forward asks of its scaling state, kept weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.modules.delayed_wgrad import DelaysWgrad
from te_hal.modules.linear_call import LinearCall, Quantizers
from te_hal.modules.quantized_weights import QuantizedWeights
from te_hal.modules.recompute import kept_for_recompute
from te_hal.modules.scaling import told_apart
from te_hal.modules.scaling_module import ScalingModule
from te_hal.modules.weight_cache import WeightCache
from te_hal.modules.weight_storage import operand_of
from te_hal.quantization import QuantizedTensor
from te_hal.quantization.custom_state import custom_formats
from te_hal.quantization.operand_formats import override_of, recipe_formats
from te_hal.recipe import CustomRecipe
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.main_grad import FirstMicrobatch, Microbatches
    from te_hal.modules.plan import LinearPlan
    from te_hal.modules.plan_cache import PlanCache
    from te_hal.modules.weight_cache import Quantized
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.recipe import Recipe
    from te_hal.schema.formats import ColumnwiseOrder


class Fp8Module(DelaysWgrad, ScalingModule):
    """Base of modules that quantize under :class:`te_hal.modules.autocast`.

    Another recipe, or the same one changed, drops the weights kept for ``is_first_microbatch``.

    Args:
        name: for messages.
        plans: what the module's calls run.

    Attributes:
        fp8: whether the last forward ran in FP8.
        fp8_calibration: whether the last forward calibrated.
        quantized_weights: those that live in FP8.
    """

    #: Whether a recipe's ``backward_override`` is followed; else it is refused.
    takes_backward_override: ClassVar[bool] = False

    def __init__(self, name: str | None, plans: PlanCache[Any, Any]) -> None:
        super().__init__(name)
        self.fp8 = False
        self.fp8_calibration = False
        self._weight_cache = WeightCache()
        self.quantized_weights = QuantizedWeights()
        self._plans = plans

    @property
    def _fp8_workspaces(self) -> dict[str, Quantized]:
        return self._weight_cache.storages

    def begin_forward(self, frame: Frame, device: torch.device, order: ColumnwiseOrder) -> None:
        """Bring scaling state and quantizers into line with the autocast in force; nothing in a recompute.

        Args:
            frame: what is in force.
            device: of the input.
            order: memory order in which quantizers lay out columnwise copies.
        """
        if frame.again:
            return
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
        if frame.record is not None:
            frame.record.take_quantizers(self.quantizers, self.fp8_meta["scaling_bwd"])

    def formats(self, frame: Frame, device: torch.device, gemm: int = 0) -> Formats | None:
        """What the operands of a product of the module become under the autocast in force; None without FP8.

        A CustomRecipe's factory is asked here, before anything of the module changes.

        Raises:
            ArgumentError: answers of the factory that cannot serve.
            UnsupportedError: a recipe with a ``backward_override`` that the module does not have.
        """
        if not frame.enabled or frame.recipe is None:
            return None
        override = override_of(frame.recipe)
        if override is not None and not self.takes_backward_override:
            raise UnsupportedError(
                f"{self.label}: backward_override",
                got=repr(override),
                accepted="None for this module; te.Linear, te.LayerNormLinear and te.GroupedLinear have both others",
                todo="leave it out of the recipe, or run this module under a recipe of its own",
            )
        if not isinstance(frame.recipe, CustomRecipe):
            return recipe_formats(frame.recipe)
        if frame.again:
            return frame.record.formats[gemm]  # type: ignore[no-any-return] # of a CallRecord
        formats = self.formats_under(frame.recipe, device, gemm)
        if frame.record is not None:
            frame.record.formats[gemm] = formats
        return formats

    def formats_under(self, recipe: Recipe, device: torch.device, gemm: int = 0) -> Formats:
        """The same under any recipe, whichever is in force; a CustomRecipe's factory is asked here.

        Raises:
            ArgumentError: answers of the factory that cannot serve.
        """
        if not isinstance(recipe, CustomRecipe):
            return recipe_formats(recipe)
        states = self._custom_scaling(recipe, device).states
        return custom_formats(states, gemm).with_override(override_of(recipe))  # type: ignore[arg-type] # custom ones

    def leave_recipe(self, before: Recipe | None, after: Recipe) -> None:
        """Say that weights kept for ``is_first_microbatch`` go."""
        if self._weight_cache.storages and before is not None:
            names = told_apart(before, after)
            warnings.warn(
                f"{self.label}: weights kept for is_first_microbatch were quantized under {names[0]}; under {names[1]} "
                "they are quantized anew. Keep one recipe until the next first microbatch.",
                stacklevel=2,
            )

    def enter_recipe(self) -> None:
        """Have weights that live in FP8 requantized by the quantizers in use, and drop those that were kept."""
        if self.fp8_initialized:
            self.quantized_weights.bind(self)
        self.clear_weight_caches()

    def clear_weight_caches(self) -> None:
        """Drop the quantized weights kept for ``is_first_microbatch``; the next forward makes new ones."""
        self._weight_cache.clear()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Module:
        self._check_cast(fn)
        self.clear_weight_caches()
        self._plans.clear()
        before = self.quantized_weights.before_move(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quantized_weights.after_move(self, before)
        return self

    def _check_cast(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse, before anything has changed, to give weights that live in FP8 a nominal dtype that they cannot have.

        Raises:
            ArgumentError: what ``fn`` makes of a tensor of the weight's dtype is none that kernels take.
        """
        for name in self.quantized_weights.gemm_of:
            weight = getattr(self, name)
            if not isinstance(weight, QuantizedTensor):
                continue
            made = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
            if made not in FLOATS:
                raise ArgumentError(
                    f"{self.label}: {name}",
                    got=f"a cast of this weight, which lives in FP8, to {made}",
                    accepted=", ".join(str(dtype) for dtype in FLOATS),
                    todo="leave the model in one of these, or make it outside of quantized_model_init",
                )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's arguments
        self.clear_weight_caches()
        super()._load_from_state_dict(*args, **kwargs)
        self.quantized_weights.take_over(self, args[0], args[1])

    def quantized_weight(
        self,
        frame: Frame,
        name: str,
        parameters: Sequence[torch.Tensor],
        weight: torch.Tensor,
        plan: LinearPlan,
        is_first_microbatch: bool | None,
        gemm: int = 0,
    ) -> Operand:
        """A weight for the gemms: kept since the first microbatch, or quantized now.

        Args:
            frame: the autocast in force.
            name: under which it is kept.
            parameters: what it was made from; a change of one makes what is kept invalid.
            weight: detached, in the activation dtype; one that lives in FP8 is not quantized again.
            plan: says which copies.
            is_first_microbatch: None: quantize. True: quantize and keep. False: take what is kept, if it fits. What
                stays plain is not kept but made each time.
            gemm: number of the product that reads it.
        """
        if isinstance(weight, QuantizedTensor):
            return operand_of(self.label, weight, plan)
        if frame.again:
            return kept_for_recompute(frame.record, name, plan) or self._cast_weight(
                frame.record.quantizers, weight, plan, gemm
            )
        kept = self._weight_cache.get(name, parameters, plan) if is_first_microbatch is False else None
        operand = kept or self._cast_weight(self.quantizers, weight, plan, gemm)
        if is_first_microbatch is None or isinstance(operand, torch.Tensor):
            return operand
        if kept is None:
            self._weight_cache.put(name, operand, parameters, plan)
        if frame.record is not None:
            frame.record.weights[name] = operand
        return operand

    def _cast_weight(
        self, quantizers: Mapping[str, Sequence[Quantizer]], weight: torch.Tensor, plan: LinearPlan, gemm: int
    ) -> Operand:
        made = plan.copies.weight_made
        return quantizers["scaling_fwd"][3 * gemm + 1].operand(
            weight, rowwise=made.rowwise, columnwise=made.columnwise, kernels=plan.casts.weight
        )

    def note_microbatch(
        self, frame: Frame, microbatches: Microbatches, flag: bool | None, *, fuses: bool, gemm: int = 0
    ) -> FirstMicrobatch | None:
        """What the weight gradient of this forward belongs to; None unless it goes into main_grad.

        Args:
            frame: the autocast in force.
            microbatches: of the weight.
            flag: ``is_first_microbatch``.
            fuses: the weight needs a gradient and it goes into main_grad, gradients being on or not.
            gemm: number of the product.
        """
        if frame.again:
            return frame.record.first_microbatches.get(gemm)  # type: ignore[no-any-return] # of a CallRecord
        wanted = torch.is_grad_enabled() or (frame.record is not None and frame.record.expects_backward)
        first = microbatches.note(flag) if fuses and wanted else None
        if frame.record is not None:
            frame.record.first_microbatches[gemm] = first
        return first

    def calibrate(self, *tensors: torch.Tensor, gemm: int = 0) -> None:
        """Record the amax of what a product reads, input before weight, without quantizing it."""
        for quantizer, tensor in zip(self.quantizers["scaling_fwd"][3 * gemm :], tensors, strict=False):
            quantizer.calibrate(tensor)

    def note_forward(self, frame: Frame) -> None:
        """Have the forward scaling state updated when the region ends, as this forward records an amax in it."""
        if frame.again:
            return
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
        delayed = self._delayed[gemm] if self._delayed else None
        if not frame.enabled:
            return LinearCall(label, plan, None, parameter, first, None, updates_backward=False, delayed=delayed)
        region, record = frame.region, frame.record
        if frame.again:
            quantizers = Quantizers.of(record.quantizers, record.backward_state, gemm)
            updates = updates_backward and record.updates
        else:
            quantizers = Quantizers.of(self.quantizers, self.fp8_meta["scaling_bwd"], gemm)
            expected = updates_backward or (record is not None and record.expects_backward)
            updates = expected and region is not None and region.take_first()
            if record is not None and updates:
                record.updates = True
        return LinearCall(label, plan, quantizers, parameter, first, region, updates, delayed)
