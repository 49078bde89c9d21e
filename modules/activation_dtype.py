"""The dtype that a module computes in: torch.autocast's where that is on, else the one all operands share."""

from __future__ import annotations

import torch

from te_hal.quantization import QuantizedTensor
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS


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
    _check_dtype(module, "input", dtype)
    given = [(name, parameter) for name, parameter in parameters.items() if parameter is not None]
    for name, parameter in given:
        if parameter.device != device:
            raise ArgumentError(
                module,
                got=f"input on {device}, {name} on {parameter.device}",
                accepted="both on one device",
                todo=f"move the model or the input: .to({str(device)!r})",
            )
        if parameter.dtype is not dtype:
            _check_dtype(module, name, parameter.dtype)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    for name, parameter in given:
        if parameter.dtype != dtype:
            raise ArgumentError(
                module,
                got=f"input of {dtype}, {name} of {parameter.dtype}",
                accepted="one dtype for input and parameters outside of torch.autocast",
                todo=f"cast the input, build the module with params_dtype={dtype}, or use torch.autocast",
            )
    return dtype


def _check_dtype(module: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ArgumentError(
            module,
            got=f"{name} of {dtype}",
            accepted=", ".join(str(dtype) for dtype in FLOATS),
            todo="cast it",
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
