"""The places in a model that a monitor looks at: quantizers, results of modules, and gradients that come to them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from te_hal.modules import Linear
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.normalization import Normalization
from te_hal.monitoring.nonfinite import Place
from te_hal.monitoring.statistics import of_plain, of_quantized

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.monitoring.statistics import Statistics
    from te_hal.quantization import Quantizer
    from te_hal.schema.storage import QuantizedStorage

    #: Takes a place, how to get its statistics (all of them, or no more than amax), and whether they belong into the
    #: history.
    Look = Callable[[Place, Callable[[bool], Statistics], bool], None]

_FORWARD_KEY = "scaling_fwd"


def watch(name: str, module: torch.nn.Module, look: Look) -> list[Callable[[], None]]:
    """Look at one module of a model from now on.

    Args:
        name: its name in the model.
        module: a module with FP8 gemms, or one without children; others hold nothing of their own.
        look: told of every tensor.

    Returns:
        What ends the watching.

    Raises:
        StateError: another monitor watches this module.
    """
    if isinstance(module, Fp8Module):
        module.observe_quantizers(lambda key, slot: _QuantizerWatch(name, module, key, slot, look))
        hook = module.register_forward_hook(_ResultWatch(name, look))
        return [lambda: module.observe_quantizers(None), hook.remove]
    if next(module.children(), None) is None:
        return [module.register_forward_hook(_ResultWatch(name, look)).remove]
    return []


def _slot_place(name: str, module: Fp8Module, key: str, slot: int) -> Place:
    roles: tuple[str, ...] = module.fp8_meta[key].roles
    role = roles[slot]
    if roles.count(role) > 1:
        gemm = module.gemm_names[roles[:slot].count(role)]
        name = f"{name}.{gemm}" if name else gemm
    return Place(name, type(module).__name__, role, "quantize", "forward" if key == _FORWARD_KEY else "backward")


class _QuantizerWatch:
    """The observer of one quantizer."""

    def __init__(self, name: str, module: Fp8Module, key: str, slot: int, look: Look) -> None:
        self._place, self._module, self._look = _slot_place(name, module, key, slot), module, look

    def __call__(self, quantizer: Quantizer, tensor: torch.Tensor | None, storage: QuantizedStorage) -> None:
        if self._module.training and 0 not in storage.shape:
            self._look(self._place, functools.partial(_statistics, quantizer, tensor, storage), True)


def _statistics(
    quantizer: Quantizer, tensor: torch.Tensor | None, storage: QuantizedStorage, detailed: bool
) -> Statistics:
    if tensor is None or detailed:
        return of_quantized(quantizer, tensor, storage)
    return of_plain(tensor)


class _ResultWatch:
    """The forward hook of one module: its result, the gradient that comes back to it, and what runs unquantized."""

    def __init__(self, name: str, look: Look) -> None:
        self._name, self._look = name, look

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        """A copied or pickled model is not watched."""
        return _nothing, ()

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        if not module.training:
            return
        result = output[0] if isinstance(output, tuple) and output else output
        if not _has_values(result):
            return
        recorded = isinstance(module, Fp8Module)
        quantizes = isinstance(module, Fp8Module) and module.fp8
        if isinstance(module, Linear) and not quantizes:
            self._tell(module, "input", "forward", inputs[0] if inputs else None, recorded=True)
            for weight in module.weight_names:
                self._tell(module, "weight", "forward", getattr(module, weight), recorded=True)
        self._tell(module, "output", "forward", result, recorded=recorded)
        if result.requires_grad and not quantizes:
            result.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._tell(module, "grad_output", "backward", gradient, recorded=recorded)
            )

    def _tell(self, module: torch.nn.Module, role: str, direction: str, tensor: object, *, recorded: bool) -> None:
        if _has_values(tensor):
            place = Place(self._name, type(module).__name__, role, _op(module), direction)
            self._look(place, lambda _: of_plain(tensor), recorded)


def _nothing() -> Callable[..., None]:
    return _watches_nothing


def _watches_nothing(*_: object) -> None:
    """The hook of a copy."""


def _has_values(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain tensor with values that can be looked at; quantized ones are seen where they are made."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and not hasattr(tensor, "quantized_storage")
        and tensor.numel() > 0
        and not tensor.is_meta
    )


def _op(module: torch.nn.Module) -> str:
    if isinstance(module, Fp8Module):
        return "gemm"
    return module.op if isinstance(module, Normalization) else type(module).__name__
