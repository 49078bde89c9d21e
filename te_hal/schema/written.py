"""Checks of a plain tensor that an op writes in place: what torch would refuse only inside a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.schema.op import OpSchema


def check_written(schema: OpSchema, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that autograd follows now, and one in which several elements share memory.

    Asked only where the tensor requires a gradient or is not contiguous; reads no data.

    Raises:
        ArgumentError: see above.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{schema.name}: {name}",
            got="a tensor that requires a gradient",
            accepted="a tensor to write in place, which autograd does not follow",
            todo="pass its .detach(), or call under torch.no_grad()",
        )
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{schema.name}: {name}",
            got=f"an expanded tensor, shape {tuple(tensor.shape)} with strides {tensor.stride()}",
            accepted="a tensor to write in place, each element in memory of its own",
            todo="pass its .clone() or a new tensor",
        )
