"""Parameters as an optimizer sees them: fp32 values to compute with, gradients, and the way back into fewer bits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from te_hal.quantization import QuantizedTensor
from te_hal.quantization.hybrid_storage import values_of
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Elements handled in one go: bounds the fp32 copies that a step makes. Where launches cost, fewer and larger ones.
_CPU_CHUNK, _CHUNK = 1 << 20, 1 << 24


def check_parameter(where: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter that no step takes.

    Raises:
        ArgumentError: not fp32, bf16 or fp16 (nominally, where quantized); a DTensor.
    """
    if _is_distributed(parameter):
        raise ArgumentError(
            f"{where}: params",
            got="a DTensor, as torch's fully_shard makes of parameters",
            accepted="tensors that one process holds whole; replicas under DistributedDataParallel are",
            todo="use an optimizer of torch.optim for it",
        )
    if parameter.dtype not in FLOATS:
        raise ArgumentError(
            f"{where}: params",
            got=f"a parameter of {parameter.dtype}",
            accepted=", ".join(map(str, FLOATS)),
            todo="leave it to another optimizer",
        )


def _is_distributed(parameter: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor cannot be where nobody imported its module
    return module is not None and isinstance(parameter, module.DTensor)


def gradient_of(where: str, parameter: torch.Tensor, attribute: str) -> torch.Tensor | None:
    """The gradient in fp32; None if there is none.

    Args:
        where: for messages.
        parameter: whose.
        attribute: ``grad`` or ``decoupled_grad``.

    Raises:
        ArgumentError: a sparse gradient, or one of another shape.
    """
    gradient = getattr(parameter, attribute, None)
    if gradient is None:
        return None
    if gradient.is_sparse or gradient.shape != parameter.shape:
        raise ArgumentError(
            f"{where}: {attribute}",
            got=f"{'a sparse gradient' if gradient.is_sparse else 'a gradient'} of shape {tuple(gradient.shape)}",
            accepted=f"a dense one of shape {tuple(parameter.shape)}",
            todo="use an optimizer for sparse gradients, or make the gradient anew",
        )
    if isinstance(gradient, QuantizedTensor):
        return gradient.dequantize(dtype=torch.float32)
    return gradient.detach().to(torch.float32)  # type: ignore[no-any-return] # a tensor


def fp32_value(parameter: torch.Tensor) -> torch.Tensor:
    """Its value in fp32: the parameter's own memory where it is fp32, a copy otherwise."""
    if isinstance(parameter, QuantizedTensor):
        return values_of(parameter.quantized_storage, torch.float32)
    return parameter.detach().to(torch.float32)


def write(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Round fp32 values into a parameter, in place; a quantized one is quantized anew from them."""
    if isinstance(parameter, QuantizedTensor):
        parameter.quantize_(values)
    elif values.data_ptr() != parameter.data_ptr() or values.numel() == 0:
        parameter.copy_(values)


def split_master(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values as bf16, rounded to nearest, and the int16 that is missing from them.

    Bits are ``(bf16 << 16) + remainder``, so a negative remainder means that the bf16 was rounded up.
    """
    bits = values.view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits - remainder) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def join_master(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """What :func:`split_master` took apart, exactly."""
    return ((high.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def chunks(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters in lists that share a device; a list ends before it has too many elements."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_device.setdefault(parameter.device, []).append(parameter)
    for device, held in by_device.items():
        most = _CPU_CHUNK if device.type == "cpu" else _CHUNK
        chunk: list[torch.Tensor] = []
        elements = 0
        for parameter in held:
            if chunk and elements + parameter.numel() > most:
                yield chunk
                chunk, elements = [], 0
            chunk.append(parameter)
            elements += parameter.numel()
        yield chunk
