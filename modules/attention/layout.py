"""How queries, keys and values lie in memory: ``sbhd`` (sequence, batch, heads, channels) or ``bshd``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

FORMATS = ("sbhd", "bshd")

#: Other formats of Transformer Engine, and what they belong to.
_LATER = {"thd": "packed sequences are not built yet"}


def check_format(where: str, qkv_format: object) -> str:
    """A format that is here.

    Raises:
        UnsupportedError: one of Transformer Engine that is not.
        ArgumentError: none at all.
    """
    if qkv_format in FORMATS:
        return str(qkv_format)
    if qkv_format in _LATER:
        todo = f"pad the sequences to one length: {_LATER[str(qkv_format)]}"
        raise UnsupportedError(where, got=repr(qkv_format), accepted=", ".join(FORMATS), todo=todo)
    raise ArgumentError(where, got=repr(qkv_format), accepted=", ".join(FORMATS), todo="correct it")


def sequence_dim(qkv_format: str) -> int:
    """The dimension of the sequence; that of the batch is the other of the first two."""
    return qkv_format.index("s")


def heads_first(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """A view ``[b, h, s, d]`` of a tensor in the given format."""
    return tensor.permute(1, 2, 0, 3) if qkv_format == "sbhd" else tensor.transpose(1, 2)


def heads_merged(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` as ``[s, b, h * d]`` or ``[b, s, h * d]``; a view where strides allow."""
    ordered = tensor.permute(2, 0, 1, 3) if qkv_format == "sbhd" else tensor.transpose(1, 2)
    return ordered.flatten(2)
