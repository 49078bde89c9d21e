"""What ops refuse to be called with, before anything has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.modules.arguments import check_tensor
from te_hal.modules.transforms import refuse_transforms
from te_hal.quantization.autocast import note_module
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def check_input(label: str, input: object, size: int | None = None, name: str = "") -> None:
    """Refuse what is no tensor, or of another last size; note for autocast that an op runs.

    Args:
        label: of the op, for the message.
        input: as given.
        size: of the last dimension; None: any.
        name: of the constructor's argument that gives it.

    Raises:
        UnsupportedError: a transform of torch.func.
        ArgumentTypeError: no tensor.
        ArgumentError: no dimension, or another last size.
    """
    note_module()
    refuse_transforms(label)
    shape = tuple(check_tensor(label, input).shape)
    if not shape or (size is not None and shape[-1] != size):
        raise wrong_size(label, shape, size, name)


def wrong_size(label: str, shape: tuple[int, ...], size: int | None, name: str) -> ArgumentError:
    """The error about an input whose last size does not fit."""
    return ArgumentError(
        f"{label}: input",
        got=f"shape {shape}",
        accepted="at least one dimension" if size is None else f"[..., {size}], as {name}={size}",
        todo="check which op feeds this one",
    )


def check_beside(label: str, what: str, tensor: object, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The extra input; refused where it is no tensor, or does not go with the op's own.

    Args:
        label: of the op, for the message.
        what: the extra input.
        tensor: as given.
        like: the op's input or result, whose dtype and device it must have.
        shape: that it must have.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape, dtype or device.
    """
    where = f"{label}: {what}"
    tensor = check_tensor(where, tensor)
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise ArgumentError(
            where,
            got=f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}",
            accepted=f"shape {shape}, {like.dtype}, on {like.device}",
            todo="reshape, cast or move it",
        )
    return tensor
