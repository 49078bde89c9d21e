"""Heads, groups and channels of attention, and whether queries, keys and values have them."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from te_hal.modules.arguments import check_size, check_tensor
from te_hal.modules.attention.layout import PACKED, leading_sizes, sequence_dim
from te_hal.schema.errors import ArgumentError

_FP32 = torch.finfo(torch.float32)


class Sizes(Protocol):
    """What a module was made for; ``num_gqa_groups`` are the heads of keys and values."""

    num_attention_heads: int
    num_gqa_groups: int
    key_channels: int
    value_channels: int


def check_groups(where: str, heads: int, groups: object) -> int:
    """Heads of keys and values; None: as many as queries have.

    Raises:
        ArgumentError: no positive int, or no divisor of ``heads``.
    """
    if groups is None:
        return heads
    count = check_size(f"{where}: num_gqa_groups", groups)
    if heads % count:
        raise ArgumentError(
            f"{where}: num_gqa_groups",
            got=f"{count} groups for num_attention_heads={heads}",
            accepted=f"a divisor of {heads}: " + ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0),
            todo="correct one of the two",
        )
    return count


def head_channels(where: str, kv_channels: object) -> tuple[int, int]:
    """Channels of a head of keys (and queries) and of values.

    Raises:
        ArgumentError: neither a positive int nor a pair of them.
    """
    pair = kv_channels if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
    if len(pair) != 2:  # noqa: PLR2004 - said in the message
        raise ArgumentError(
            f"{where}: kv_channels",
            got=repr(kv_channels),
            accepted="an int, or a pair (keys, values)",
            todo="correct it",
        )
    keys, values = (check_size(f"{where}: kv_channels", channels) for channels in pair)
    return keys, values


def check_probability(where: str, probability: object) -> float:
    """A share that may be dropped.

    Raises:
        ArgumentError: no number of at least 0 and below 1.
    """
    if isinstance(probability, (int, float)) and not isinstance(probability, bool) and 0 <= probability < 1:
        return float(probability)
    raise ArgumentError(where, got=repr(probability), accepted="a number of at least 0, below 1", todo="correct it")


def check_scale(where: str, scale: object, channels: int) -> float:
    """What scores are multiplied by; None: 1 / sqrt(channels).

    Raises:
        ArgumentError: no positive number of fp32's range: 0 times the -inf of a hidden score would be NaN.
    """
    if scale is None:
        return 1.0 / math.sqrt(channels)
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and _FP32.tiny <= scale <= _FP32.max:
        return float(scale)
    raise ArgumentError(
        f"{where}: softmax_scale",
        got=repr(scale),
        accepted="a positive number that fp32 holds, or None",
        todo="correct it",
    )


def check_attention_type(where: str, attention_type: object) -> str:
    """Check that it is "self" or "cross".

    Raises:
        ArgumentError: anything else.
    """
    if attention_type not in ("self", "cross"):
        raise ArgumentError(
            f"{where}: attention_type", got=repr(attention_type), accepted="'self', 'cross'", todo="correct it"
        )
    return str(attention_type)


def check_sizes(
    where: str, given: tuple[object, object, object], qkv_format: str, sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values with the heads and channels of the module, one batch, and a value for each key.

    Raises:
        ArgumentTypeError: one is no tensor.
        ArgumentError: one has another shape.
    """
    names = ("query_layer", "key_layer", "value_layer")
    tails = (
        (sizes.num_attention_heads, sizes.key_channels),
        (sizes.num_gqa_groups, sizes.key_channels),
        (sizes.num_gqa_groups, sizes.value_channels),
    )
    lead = leading_sizes(qkv_format)
    rank = len(qkv_format)
    found: list[torch.Tensor] = []
    for name, value, tail in zip(names, given, tails, strict=True):
        tensor = check_tensor(f"{where}: {name}", value)
        if tensor.dim() != rank or tuple(tensor.shape[-2:]) != tail:
            raise ArgumentError(
                f"{where}: {name}",
                got=f"shape {tuple(tensor.shape)}",
                accepted=f"[{lead}, {tail[0]}, {tail[1]}], as the module's heads and channels",
                todo="view the last dimension as heads and channels, or correct the module's sizes",
            )
        found.append(tensor)
    query, key, value = found
    batch = None if qkv_format == PACKED else 1 - sequence_dim(qkv_format)
    one_batch = batch is None or key.shape[batch] == query.shape[batch]
    if key.shape[:-2] != value.shape[:-2] or not one_batch:
        raise ArgumentError(
            where,
            got=", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, found, strict=True)),
            accepted=f"one batch size, and as many values as keys, in the format {qkv_format!r}",
            todo="correct them, or pass the qkv_format that they have",
        )
    return query, key, value
