"""GemmParameters: weight and bias of one product of a module, each possibly as several named parameters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.call_checks import check_parameter
from te_hal.modules.quantized_weights import readable_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.modules.fp8_module import Fp8Module

_INIT_STD = 0.023

#: Normal, mean 0: Transformer Engine's default.
DEFAULT_INIT = partial(torch.nn.init.normal_, mean=0.0, std=_INIT_STD)


class Read(NamedTuple):
    """Parameters as a call finds them.

    Attributes:
        parts: the weights as the user holds them.
        weight: one ``[out_features, in_features]``.
        bias: one ``[out_features]``, or None.
    """

    parts: list[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None


class GemmParameters:
    """Names and shapes of the parameters of one product; the parameters themselves are the module's.

    Args:
        in_features: columns of the weight.
        rows: prefix of a parameter's name to its rows of the weight, in order.
        bias: whether there is one.
        prefix: of all names.

    Attributes:
        shape: of the weight, parts together.
        weight_names: of the weights, in order.
        bias_names: of the biases, in order; none without a bias.
    """

    def __init__(self, in_features: int, rows: Mapping[str, int], *, bias: bool, prefix: str = "") -> None:
        self.shape = (sum(rows.values()), in_features)
        self._rows = {f"{prefix}{part}": count for part, count in rows.items()}
        self.weight_names = [f"{part}weight" for part in self._rows]
        self.bias_names = [f"{part}bias" for part in self._rows] if bias else []

    def register(self, module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters, without values."""
        for part, rows in self._rows.items():
            weight = torch.empty(rows, self.shape[1], dtype=dtype, device=device)
            module.register_parameter(f"{part}weight", torch.nn.Parameter(weight))
            if self.bias_names:
                bias = torch.nn.Parameter(torch.empty(rows, dtype=dtype, device=device))
                module.register_parameter(f"{part}bias", bias)
            else:
                # As in Transformer Engine: the attribute exists, but holds nothing and is no parameter.
                setattr(module, f"{part}bias", torch.empty(0, dtype=dtype, device=device))

    def fill(self, module: Fp8Module, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Weights by ``init_method``, biases to 0, in place; on the meta device nothing happens.

        Inside ``quantized_model_init`` the weight is quantized then.
        """
        with torch.no_grad():
            for name in self.weight_names:
                weight = getattr(module, name)
                if not module.quantized_weights.fill(module, name, init_method) and not weight.is_meta:
                    init_method(weight)
            for name in self.bias_names:
                getattr(module, name).zero_()
        module.quantized_weights.quantize(module, self.weight_names)

    def read(self, module: torch.nn.Module, label: str) -> Read:
        """The parameters as they are now, parts joined.

        Raises:
            ArgumentError: one was replaced by another of a shape that does not fit.
            StateError: the weight lives in FP8, and the autocast in force is of another family of recipes.
        """
        parts = [getattr(module, name) for name in self.weight_names]
        weight, bias = _joined(parts), _joined([getattr(module, name) for name in self.bias_names])
        if weight.shape != self.shape:
            check_parameter(label, self._name("weight"), weight, self.shape)
        if bias is not None and bias.shape != self.shape[:1]:
            check_parameter(label, self._name("bias"), bias, self.shape[:1])
        return Read(parts, readable_weight(module, label, weight), bias)

    def _name(self, which: str) -> str:
        names = self.weight_names if which == "weight" else self.bias_names
        return names[0] if len(names) == 1 else which


def returned_bias(bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a module with ``return_bias`` returns beside its output; of no elements without a bias."""
    return torch.empty(0, dtype=dtype, device=device) if bias is None else bias


def _joined(parts: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - a tensor unless there are no parts
    """Split parameters as one tensor; None without any."""
    if len(parts) > 1:
        return torch.cat(list(parts))
    return parts[0] if parts else None
