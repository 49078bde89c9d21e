"""The dtype that a module computes in: torch.autocast's where that is on, else the one all operands share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from te_hal.quantization import QuantizedTensor
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping


def activation_dtype(module: str, input: torch.Tensor, **parameters: torch.Tensor | None) -> torch.dtype:
    """Find the activation dtype and refuse what does not fit together.

    Args:
        module: module class and name, for messages.
        input: the module's input.
        parameters: its parameters by name; None where there is none.

    Returns:
        torch.autocast's dtype if it is on for the input's device type, else the common dtype.

    Raises:
        ArgumentError: devices differ; dtypes differ without torch.autocast; a dtype that no gemm takes.
    """
    dtype, device = input.dtype, input.device
    device_type = device.type
    if dtype not in FLOATS:
        raise unusable(module, {"input": input, **parameters})
    same = True
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.device != device:
            raise ArgumentError(
                module,
                got=f"input on {device}, {name} on {parameter.device}",
                accepted="both on one device",
                todo=f"move the model or the input: .to({str(device)!r})",
            )
        if parameter.dtype is not dtype:
            if parameter.dtype not in FLOATS:
                raise unusable(module, {"input": input, **parameters})
            same = False
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    if not same:
        raise _mixed(module, dtype, parameters)
    return dtype


def parameters_dtype(module: str, input: torch.Tensor, **parameters: torch.Tensor | None) -> torch.dtype:
    """The activation dtype where the input follows the parameters, as in ``te.ops``: an input of another dtype is cast.

    Args:
        module: as in activation_dtype.
        input: the same.
        parameters: the same; the first one's dtype is that of all.

    Raises:
        ArgumentError: as there; parameters whose dtypes differ.
    """
    own = next((parameter.dtype for parameter in parameters.values() if parameter is not None), input.dtype)
    if own is not input.dtype and own in FLOATS and input.dtype in FLOATS:
        return activation_dtype(module, torch.empty(0, dtype=own, device=input.device), **parameters)
    return activation_dtype(module, input, **parameters)


#: Whether torch.autocast knows a device type, which stays what it is.
_has_autocast = functools.cache(torch.amp.is_autocast_available)


def _mixed(module: str, dtype: torch.dtype, parameters: Mapping[str, torch.Tensor | None]) -> ArgumentError:
    name, other = next((name, p.dtype) for name, p in parameters.items() if p is not None and p.dtype != dtype)
    return ArgumentError(
        module,
        got=f"input of {dtype}, {name} of {other}",
        accepted="one dtype for input and parameters outside of torch.autocast",
        todo=f"cast the input, build the module with params_dtype={dtype} (an op with dtype), or use torch.autocast",
    )


def unusable(module: str, operands: Mapping[str, torch.Tensor | None]) -> ArgumentError:
    """The error about operands whose dtype no kernel takes: names all of them, and what to cast.

    Args:
        module: module class and name.
        operands: the input as "input", and the parameters by name.
    """
    given = {name: operand.dtype for name, operand in operands.items() if operand is not None}
    names: dict[torch.dtype, list[str]] = {}
    for name, dtype in given.items():
        if dtype not in FLOATS:
            names.setdefault(dtype, []).append(name)
    fitting = next((dtype for dtype in given.values() if dtype in FLOATS), torch.float32)
    if list(names.values()) == [["input"]]:
        todo = f"cast it: .to({fitting})"
    else:
        todo = f"cast the model and its input: .to({fitting})"
    return ArgumentError(
        module,
        got="; ".join(f"{', '.join(of_dtype)} of {dtype}" for dtype, of_dtype in names.items()),
        accepted=", ".join(str(dtype) for dtype in FLOATS),
        todo=todo,
    )


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, with autograd.

    Quantized ones stay as they are; a quantized parameter gets the nominal dtype, which its codes don't depend on.
    """
    if tensor.dtype == dtype or (isinstance(tensor, QuantizedTensor) and not isinstance(tensor, torch.nn.Parameter)):
        return tensor
    return tensor.to(dtype)


def plain_input(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, with autograd; dequantized if need be."""
    return tensor.dequantize(dtype=dtype) if isinstance(tensor, QuantizedTensor) else cast_if_needed(tensor, dtype)
