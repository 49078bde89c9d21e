"""QuantizedWeights: the gemm weights of one module that live in FP8 (te_hal.modules.quantized_model_init)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

import te_hal.ops
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.weight_storage import copies_on, empty, fills, refuse_python, same_codes, stored
from te_hal.quantization import Float8Quantizer, QuantizedTensor
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.custom_state import CustomScalingState
from te_hal.quantization.model_init import current_model_init
from te_hal.quantization.quantized_tensor import dequantized, wrap
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.modules.fp8_module import Fp8Module
    from te_hal.quantization import Quantizer
    from te_hal.quantization.linear_calls import Copies, HybridCopies
    from te_hal.recipe import Recipe

_INITIAL = "_high_precision_init_val"


class QuantizedWeights:
    """Which weights of a module live in FP8, and under which recipe.

    Attributes:
        gemm_of: name of the parameter to the number of the product that reads it.
        recipe: of the block in which the module was made; None where no weight is quantized.
    """

    def __init__(self) -> None:
        self.gemm_of: dict[str, int] = {}
        self.recipe: Recipe | None = None
        self._preserve = False

    def quantize(self, module: Fp8Module, names: Sequence[str]) -> None:
        """Replace the weight of the module's next product by a quantized tensor, inside ``quantized_model_init``.

        On the meta device it has no values: they come from :meth:`fill`, or are loaded, once the module is elsewhere.

        Args:
            module: whose.
            names: of the parameters that make up the weight.

        Raises:
            ArgumentError: several of them; a size that FP8 cannot take.
        """
        wanted = current_model_init()
        if wanted is None or names[0] in self.gemm_of:
            return
        weight, gemm = getattr(module, names[0]), len(set(self.gemm_of.values()))
        _refuse_parts(module, names)
        formats = module.formats_under(wanted.recipe, weight.device, gemm)
        check_fp8_shape(module.label, names[0], tuple(weight.shape), formats)
        self.recipe, self._preserve = wanted.recipe, wanted.preserve
        quantizer, copies = self._made_on(module, gemm, weight.device)
        refuse_python(f"{module.label}: {names[0]}", quantizer)
        self.gemm_of[names[0]] = gemm
        storage: Any = stored(quantizer, weight.detach(), copies)
        held = torch.nn.Parameter(wrap(storage, quantizer=quantizer), requires_grad=weight.requires_grad)
        held.__dict__.update({name: value for name, value in weight.__dict__.items() if name != "_is_param"})
        self._keep_initial_value(held, weight.detach())
        setattr(module, names[0], held)

    def fill(self, module: Fp8Module, name: str, init_method: Callable[[torch.Tensor], Any]) -> bool:
        """Give a weight that lives in FP8 a new initial value, as when it was made, in place.

        Args:
            module: whose.
            name: of the parameter.
            init_method: called with a plain tensor of the weight's nominal dtype.

        Returns:
            Whether the weight lives in FP8; if not, nothing was done. On the meta device there is nothing to do.
        """
        weight = getattr(module, name)
        if not isinstance(weight, QuantizedTensor) or name not in self.gemm_of:
            return False
        if not weight.is_meta:
            plain = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            init_method(plain)
            module.use_recipe(self.recipe, weight.device)  # type: ignore[arg-type] # there is one
            quantizer = _weight_quantizer(module, self.gemm_of[name])
            if isinstance(quantizer, Float8Quantizer) and _margin(module, self.gemm_of[name]) is not None:
                quantizer.scale.fill_(1.0)  # that of the values before says nothing
            weight._quantizer = quantizer  # noqa: SLF001 - as it was given one
            with torch.no_grad():
                weight.quantize_(plain)
            self._keep_initial_value(weight, plain)
        return True

    def _made_on(self, module: Fp8Module, gemm: int, device: torch.device) -> tuple[Quantizer, Copies | HybridCopies]:
        """The module's quantizer for a weight on a device, and the copies that it makes there."""
        recipe: Recipe = self.recipe  # type: ignore[assignment] # there is one where weights live in FP8
        module.use_recipe(recipe, device)
        quantizer = _weight_quantizer(module, gemm)
        return quantizer, copies_on(quantizer, module.formats_under(recipe, device, gemm), device)

    def _keep_initial_value(self, weight: torch.Tensor, plain: torch.Tensor) -> None:
        if self._preserve:
            value = None if plain.is_meta else plain.to("cpu", copy=True)
            weight._high_precision_init_val = value  # type: ignore[attr-defined] # noqa: SLF001 - as Transformer Engine has it

    def before_move(self, module: Fp8Module) -> dict[str, QuantizedTensor]:
        """The weights that live in FP8, by name, for :meth:`after_move`."""
        weights = {name: getattr(module, name) for name in self.gemm_of}
        return {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedTensor)}

    def after_move(self, module: Fp8Module, before: Mapping[str, QuantizedTensor]) -> None:
        """Go on after torch has moved or cast the parameters, for which it may have made new ones.

        They keep the preserved initial value; those that leave the meta device get the copies that are read where
        they are now, still without values.
        """
        for name, former in before.items():
            weight = getattr(module, name)
            if _INITIAL in former.__dict__:
                weight.__dict__.setdefault(_INITIAL, former.__dict__[_INITIAL])
            if former.is_meta and not weight.is_meta and isinstance(weight, QuantizedTensor):
                quantizer, copies = self._made_on(module, self.gemm_of[name], weight.device)
                storage: Any = empty(quantizer, tuple(weight.shape), weight.dtype, weight.device, copies)
                weight.data = wrap(storage, quantizer=quantizer)
                weight._quantizer = quantizer  # noqa: SLF001 - as it was given one

    def bind(self, module: Fp8Module) -> None:
        """Have the weights requantized by the module's quantizers in use, where they are of the weights' recipe."""
        if self.recipe is None or module.fp8_meta["recipe"].family != self.recipe.family:
            return
        for name, gemm in self.gemm_of.items():
            weight, quantizer = getattr(module, name), _weight_quantizer(module, gemm)
            if isinstance(weight, QuantizedTensor) and fills(quantizer, weight.quantized_storage):
                weight._quantizer = quantizer  # noqa: SLF001 - as it was given one

    def take_over(self, module: Fp8Module, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Quantize values that were loaded anew and are not of the weights' kind, by their own amax.

        Whatever scale was there belongs to other values; the state goes on from theirs. Codes of the weights' kind stay
        as they are: their scale is in the state that came along, and where none came the state starts from their amax.
        A value of another shape is left to torch, which refuses it.

        Args:
            module: whose.
            state_dict: what was loaded.
            prefix: of the module's keys.
        """
        came_along = module.has_scaling_state
        for name, gemm in self.gemm_of.items():
            value, weight = state_dict.get(prefix + name), getattr(module, name)
            if self.recipe is None or not isinstance(weight, QuantizedTensor) or not isinstance(value, torch.Tensor):
                continue
            if value.shape != weight.shape:
                continue  # torch has noted it, and raises naming every such key once all modules are through
            held = weight.quantized_storage
            same = isinstance(value, QuantizedTensor) and same_codes(value.quantized_storage, held)
            if same and (came_along or held.mode is not ScalingMode.TENSOR):
                continue
            module.use_recipe(self.recipe, weight.device)
            quantizer = _weight_quantizer(module, gemm)
            plain = dequantized(value.detach()).to(weight.device, weight.dtype)
            margin = _margin(module, gemm)
            if isinstance(quantizer, Float8Quantizer) and margin is not None:
                amax = te_hal.ops.amax(plain)
                largest = quantizer.format.max * 2.0**-margin
                quantizer.scale.copy_(te_hal.ops.compute_scale(amax, fp8_max=largest))
                quantizer.amax.copy_(amax)
            if not same:
                with torch.no_grad():
                    weight.quantize_(plain)


def _refuse_parts(module: Fp8Module, names: Sequence[str]) -> None:
    if len(names) > 1:
        raise ArgumentError(
            f"{module.label}: parameters_split",
            got=f"{len(names)} weights inside quantized_model_init",
            accepted="one: its parts would share a scale",
            todo="leave one of the two out",
        )


def _margin(module: Fp8Module, gemm: int) -> float | None:
    """Margin of the delayed scaling that the module keeps a weight's scale by; None where it keeps none.

    A Float8Quantizer that a CustomRecipe's factory made has a scale of the user's.
    """
    state, slot = module.fp8_meta["scaling_fwd"], 3 * gemm + 1
    if isinstance(state, CustomScalingState):
        return state.delayed.recipe.margin if state.delayed is not None and slot in state.slots else None
    return getattr(module.fp8_meta["recipe"], "margin", None)


def _weight_quantizer(module: Fp8Module, gemm: int) -> Quantizer:
    return module.quantizers["scaling_fwd"][3 * gemm + 1]


def _warn_of_plain(label: str, recipe: object) -> None:
    warnings.warn(
        f"{label}: a weight that quantized_model_init made by {type(recipe).__name__} has become plain, with the "
        "bytes of one, and is quantized at each forward. torch's fully_shard replaces such weights, so does loading "
        "plain ones with assign=True: make the model outside of quantized_model_init there",
        stacklevel=5,
    )


def readable_weight(module: torch.nn.Module, label: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight as a call reads it: quantized under an autocast of its recipe's family, dequantized outside of any.

    Raises:
        StateError: an autocast of another family.
    """
    if not isinstance(weight, QuantizedTensor):
        if module.quantized_weights.gemm_of:  # type: ignore[union-attr] # of every module with gemms
            _warn_of_plain(label, module.quantized_weights.recipe)  # type: ignore[union-attr] # as above
        return weight
    frame = current_frame()
    if not frame.enabled or frame.recipe is None:
        warnings.warn(f"{label}: FP8 weights outside of autocast are dequantized at each forward", stacklevel=4)
        return weight.dequantize()
    recipe = module.quantized_weights.recipe  # type: ignore[union-attr] # of every module with gemms
    if recipe is not None and recipe.family != frame.recipe.family:  # type: ignore[union-attr]
        raise StateError(
            f"{label}: recipe mismatch",
            got=f"autocast under {type(frame.recipe).__name__}",
            accepted=f"{type(recipe).__name__}, by which its weights were quantized",
            todo="use that recipe, or make the model outside of quantized_model_init",
        )
    return weight
