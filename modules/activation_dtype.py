"""The dtype that a module computes in: torch.autocast's where that is on, else the one all operands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.quantization import Float8Tensor
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping


def activation_dtype(module: str, input: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Find the activation dtype and refuse what does not fit together.

    Args:
        module: module class and name, for messages.
        input: the module's input.
        parameters: its parameters by name.

    Returns:
        torch.autocast's dtype if it is on for the input's device type, else the common dtype.

    Raises:
        ArgumentError: devices differ; dtypes differ without torch.autocast; a dtype that no gemm takes.
    """
    for name, parameter in parameters.items():
        if parameter.device != input.device:
            raise ArgumentError(
                module,
                got=f"input on {input.device}, {name} on {parameter.device}",
                accepted="both on one device",
                todo=f"move the model or the input: .to({str(input.device)!r})",
            )
    device_type = input.device.type
    dtype: torch.dtype
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = input.dtype
        for name, parameter in parameters.items():
            if parameter.dtype != dtype:
                raise ArgumentError(
                    module,
                    got=f"input of {dtype}, {name} of {parameter.dtype}",
                    accepted="one dtype for input and parameters outside of torch.autocast",
                    todo=f"cast the input, build the module with params_dtype={dtype}, or use torch.autocast",
                )
    if dtype not in FLOATS:
        raise ArgumentError(
            module,
            got=f"activation dtype {dtype}",
            accepted=", ".join(str(accepted) for accepted in FLOATS),
            todo="cast input and parameters",
        )
    return dtype


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, with autograd; quantized tensors stay as they are."""
    if tensor.dtype == dtype or isinstance(tensor, Float8Tensor):
        return tensor
    return tensor.to(dtype)
