"""Tensors of the caller that results are written into."""

from __future__ import annotations

import torch

from te_hal.schema.errors import ArgumentError


def check_buffer(where: str, buffer: object, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor of the caller that a result cannot be written into.

    Args:
        where: the module and the argument, for messages.
        buffer: what the caller gave; None: nothing.
        shape: of the result.
        dtype: of the result.
        device: of the result.

    Raises:
        ArgumentError: no tensor, or one of another shape, dtype or device, with gaps, or that needs a gradient.
    """
    if buffer is None:
        return
    if isinstance(buffer, torch.Tensor):
        same = buffer.shape == shape and buffer.dtype == dtype and buffer.device == device
        if same and buffer.is_contiguous() and not buffer.requires_grad:
            return
        got = (
            f"{tuple(buffer.shape)} of {buffer.dtype} on {buffer.device}, strides {buffer.stride()}, "
            f"requires_grad={buffer.requires_grad}"
        )
    else:
        got = f"a {type(buffer).__name__}"
    raise ArgumentError(
        where,
        got=got,
        accepted=f"{shape} of {dtype} on {device}, contiguous, without gradient",
        todo="make it with torch.empty, and pass buffer.detach() when it is used again",
    )
