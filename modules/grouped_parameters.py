"""GroupedParameters: weights and biases of products of one shape: a parameter for each, or one for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.call_checks import check_parameter
from te_hal.modules.delayed_wgrad import Target
from te_hal.modules.quantized_weights import readable_weight
from te_hal.quantization.model_init import current_model_init
from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.modules.fp8_module import Fp8Module


class GroupedRead(NamedTuple):
    """Parameters as a call finds them, by product.

    Attributes:
        parameters: the weights as the user holds them; of a stacked weight the same one for every product.
        weights: ``[out_features, in_features]`` each.
        biases: ``[out_features]`` each; empty without any.
    """

    parameters: list[torch.Tensor]
    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor]


class GroupedParameters:
    """Names and shapes of the parameters; the parameters themselves are the module's.

    ``weight0``, ``weight1``, ... and ``bias0``, ...; stacked ``weight`` and ``bias``, with the products first.

    Args:
        count: how many products.
        shape: of each weight.
        bias: whether there are any.
        single_weight, single_bias: stack them in one parameter.

    Attributes:
        weight_names: of the weights, in order.
        bias_names: of the biases, in order; none without.
        single_weight: the weights are stacked.
    """

    def __init__(
        self, count: int, shape: tuple[int, int], *, bias: bool, single_weight: bool, single_bias: bool
    ) -> None:
        self.count, self.shape, self._bias = count, shape, bias
        self.single_weight, self._single_bias = single_weight, single_bias
        self.weight_names = ["weight"] if single_weight else [f"weight{number}" for number in range(count)]
        self._bias_slots = ["bias"] if single_bias else [f"bias{number}" for number in range(count)]
        self.bias_names = self._bias_slots if bias else []

    def targets(self) -> list[Target]:
        """Where the weight gradient of each product goes."""
        if self.single_weight:
            return [Target(("weight",), number) for number in range(self.count)]
        return [Target((name,)) for name in self.weight_names]

    def register(self, module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters, without values."""
        for name in self.weight_names:
            weight = torch.empty(self._stacked(self.shape, single=self.single_weight), dtype=dtype, device=device)
            module.register_parameter(name, torch.nn.Parameter(weight))
        of_bias = self._stacked(self.shape[:1], single=self._single_bias)
        for name in self._bias_slots:
            if self._bias:
                module.register_parameter(name, torch.nn.Parameter(torch.empty(of_bias, dtype=dtype, device=device)))
            else:
                # As in Transformer Engine: the attribute exists, but holds nothing and is no parameter.
                setattr(module, name, torch.empty(0, dtype=dtype, device=device))

    def _stacked(self, shape: tuple[int, ...], *, single: bool) -> tuple[int, ...]:
        return (self.count, *shape) if single else shape

    def fill(self, module: Fp8Module, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Weights by ``init_method``, product by product, biases to 0, in place; nothing on the meta device.

        Inside ``quantized_model_init`` the weights are quantized then.

        Raises:
            UnsupportedError: a stacked weight there.
        """
        if self.single_weight and current_model_init() is not None:
            raise UnsupportedError(
                f"{module.label}: single_grouped_weight",
                got="a stacked weight inside quantized_model_init",
                accepted="a weight for each product: stacked ones would share a scale, or blocks that cross products",
                todo="leave one of the two out",
            )
        with torch.no_grad():
            for name in self.weight_names:
                weight = getattr(module, name)
                if not module.quantized_weights.fill(module, name, init_method) and not weight.is_meta:
                    for each in weight.unbind(0) if self.single_weight else (weight,):
                        init_method(each)
            for name in self.bias_names:
                getattr(module, name).zero_()
        for name in self.weight_names:
            module.quantized_weights.quantize(module, [name])

    def read(self, module: torch.nn.Module, label: str) -> GroupedRead:
        """The parameters as they are now.

        Raises:
            ArgumentError: one was replaced by another of a shape that does not fit.
            StateError: weights live in FP8, and the autocast in force is of another family of recipes.
        """
        parameters = [getattr(module, name) for name in self.weight_names]
        biases = [getattr(module, name) for name in self.bias_names]
        of_weight = self._stacked(self.shape, single=self.single_weight)
        of_bias = self._stacked(self.shape[:1], single=self._single_bias)
        for names, found, shape in ((self.weight_names, parameters, of_weight), (self.bias_names, biases, of_bias)):
            for name, parameter in zip(names, found, strict=True):
                check_parameter(label, name, parameter, shape)
        weights: list[torch.Tensor] = []
        for parameter in parameters:
            weights.append(readable_weight(module, label, parameter))  # noqa: PERF401 - its warning counts frames
        if self._single_bias:
            biases = list(biases[0].unbind(0)) if biases else []
        if self.single_weight:
            return GroupedRead(parameters * self.count, weights[0].unbind(0), biases)
        return GroupedRead(parameters, weights, biases)
