"""Two orders of the rows of a gated layer's weight and bias: halves, or blocks of both halves in turn."""

from __future__ import annotations

import torch

from te_hal.modules.arguments import check_tensor
from te_hal.schema.errors import ArgumentError


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """From halves, gate before linear part, to blocks of ``interleave_size`` rows of either in turn.

    Args:
        tensor: ``[2 F, ...]`` of any dtype.
        interleave_size: rows of a block; F is a multiple of it.

    Returns:
        A new tensor of the same shape; gradients pass back.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: a size that does not divide, or no dimension.
    """
    blocks = _check("interleave_glu_tensor", tensor, interleave_size)
    return _turned(tensor, (2, blocks, interleave_size))


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The way back from :func:`interleave_glu_tensor`; arguments, result and errors as there."""
    blocks = _check("deinterleave_glu_tensor", tensor, interleave_size)
    return _turned(tensor, (blocks, 2, interleave_size))


def _turned(tensor: torch.Tensor, rows: tuple[int, int, int]) -> torch.Tensor:
    turned = tensor.reshape(*rows, *tensor.shape[1:]).transpose(0, 1)
    return turned.clone(memory_format=torch.contiguous_format).view(tensor.shape)


def _check(where: str, tensor: object, interleave_size: object) -> int:
    """How many blocks each half has."""
    tensor = check_tensor(where, tensor)
    known = type(interleave_size) is int and interleave_size > 0
    if not known or not tensor.dim() or tensor.shape[0] % (2 * interleave_size):  # type: ignore[operator] # an int
        raise ArgumentError(
            where,
            got=f"shape {tuple(tensor.shape)}, interleave_size={interleave_size!r}",
            accepted="a first size that is a multiple of 2 x interleave_size, an int above 0",
            todo="choose a block that divides each half",
        )
    return tensor.shape[0] // (2 * interleave_size)  # type: ignore[operator]
