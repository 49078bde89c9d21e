"""How queries, keys and values lie in memory.

``sbhd`` (sequence, batch, heads, channels), ``bshd``, or ``thd``: the tokens of all sequences in one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    import torch

PACKED = "thd"
FORMATS = ("sbhd", "bshd", PACKED)


def check_format(where: str, qkv_format: object) -> str:
    """One of FORMATS.

    Raises:
        ArgumentError: anything else.
    """
    if qkv_format in FORMATS:
        return str(qkv_format)
    raise ArgumentError(where, got=repr(qkv_format), accepted=", ".join(FORMATS), todo="correct it")


def sequence_dim(qkv_format: str) -> int:
    """The dimension of the sequence; that of the batch is the other of the first two. Not for ``thd``."""
    return qkv_format.index("s")


def leading_sizes(qkv_format: str) -> str:
    """The sizes before heads and channels, for messages: "s, b", "b, s" or "t"."""
    return "t" if qkv_format == PACKED else ", ".join(qkv_format[:2])


def heads_first(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """A view ``[b, h, s, d]`` of a tensor in the given format; not for ``thd``."""
    return tensor.permute(1, 2, 0, 3) if qkv_format == "sbhd" else tensor.transpose(1, 2)


def heads_merged(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` as ``[s, b, h * d]`` or ``[b, s, h * d]``; a view where strides allow. Not for ``thd``."""
    ordered = tensor.permute(2, 0, 1, 3) if qkv_format == "sbhd" else tensor.transpose(1, 2)
    return ordered.flatten(2)
