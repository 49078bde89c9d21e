"""Queries, keys and values that come in one tensor, or keys and values in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.arguments import check_tensor
from te_hal.modules.attention.layout import leading_sizes
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    import torch

#: Where the three (or two) lie: before heads and channels, or between them.
_DIMS = (-3, -2)


def unpacked(where: str, given: dict[str, Any], qkv_format: str) -> tuple[object, object, object]:
    """Queries, keys and values of a call.

    Args:
        where: the module, for messages.
        given: the call's arguments: ``query_layer``, ``key_layer``, ``value_layer``, or ``qkv_layer``, or
            ``query_layer`` and ``kv_layer``; ``qkv_interleave_dim``.
        qkv_format: of the call.

    Raises:
        ArgumentTypeError: what is packed is no tensor.
        ArgumentError: both ways at once; another number of parts, another ``qkv_interleave_dim``.
    """
    apart = {name: given.get(name) for name in ("query_layer", "key_layer", "value_layer")}
    dim = given.get("qkv_interleave_dim", _DIMS[0])
    if dim == _DIMS[0] and "qkv_layer" not in given and "kv_layer" not in given:
        return apart["query_layer"], apart["key_layer"], apart["value_layer"]
    for name, count, replaces in (
        ("qkv_layer", 3, ("query_layer", "key_layer", "value_layer")),
        ("kv_layer", 2, ("key_layer", "value_layer")),
    ):
        packed = given.get(name)
        if packed is None:
            continue
        twice = next(
            (other for other in (*replaces, "kv_layer") if other != name and given.get(other) is not None), None
        )
        if twice is not None:
            raise ArgumentError(
                f"{where}: {name}", got=f"it and {twice}", accepted="one of the two", todo=f"leave {twice} out"
            )
        apart.update(zip(replaces, _split(where, name, packed, count, dim, qkv_format), strict=True))
        return apart["query_layer"], apart["key_layer"], apart["value_layer"]
    if dim != _DIMS[0]:
        raise ArgumentError(
            f"{where}: qkv_interleave_dim",
            got=f"{dim} without qkv_layer or kv_layer",
            accepted="-3: nothing would read it",
            todo="leave it out",
        )
    return apart["query_layer"], apart["key_layer"], apart["value_layer"]


def _split(where: str, name: str, packed: object, count: int, dim: object, qkv_format: str) -> tuple[torch.Tensor, ...]:
    packed = check_tensor(f"{where}: {name}", packed)
    if type(dim) is not int or dim not in _DIMS:
        raise ArgumentError(
            f"{where}: qkv_interleave_dim", got=repr(dim), accepted="-3 or -2", todo="say where the parts lie"
        )
    rank = len(qkv_format) + 1
    if packed.dim() != rank or packed.shape[dim] != count:
        lead = leading_sizes(qkv_format)
        shape = f"{lead}, {count}, h, d" if dim == _DIMS[0] else f"{lead}, h, {count}, d"
        raise ArgumentError(
            f"{where}: {name}",
            got=f"shape {tuple(packed.shape)}",
            accepted=f"[{shape}] by qkv_format and qkv_interleave_dim={dim}",
            todo="correct it, or pass queries, keys and values apart",
        )
    return packed.unbind(dim)
