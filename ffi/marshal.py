"""From tensors to addresses and sizes: the rules that every family of marshalling/ follows.

An address comes from ``data_ptr()`` and from nothing else: cffi would take a tensor of one element by its value. A
tensor that is read may need a gradient: ops do not differentiate, so its data alone is looked at. One that is not
contiguous is copied; one that is written in place and is not contiguous gets a contiguous stand-in, which is copied
back. A tensor without elements has the address 0, which the library would take for an operand that is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native

#: Stands for the address of a tensor without elements. Nobody reads there.
NOTHING_TO_READ = 16


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data without gaps, in row-major order; itself where it is so already."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def address(tensor: torch.Tensor | None) -> int:
    """The address of an operand that may be left out; 0 then. For contiguous tensors."""
    return 0 if tensor is None else tensor.data_ptr() or NOTHING_TO_READ


def scratch(workspace: torch.Tensor | None) -> tuple[int, int]:
    """Address and size of a workspace; twice 0 for none."""
    return (0, 0) if workspace is None else (workspace.data_ptr(), workspace.numel())


def rows_and_cols(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """``[..., K]`` as ``(rows, K)``; a vector is one row."""
    if len(shape) == 2:  # noqa: PLR2004 - the usual case, without a loop
        return shape[0], shape[1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if shape else 1)


def check_writable(native: Native, op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse to write past autograd.

    Raises:
        ArgumentError: the tensor requires a gradient.
    """
    if tensor.requires_grad:
        raise ArgumentError(
            f"{op} on backend {native.backend}: {name}",
            got="a tensor that requires a gradient, to be written in place",
            accepted="a tensor that does not",
            todo="pass tensor.detach(), or call the op under a torch.autograd.Function",
        )
