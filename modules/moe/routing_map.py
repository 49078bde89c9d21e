"""Routing maps that a router gives: a byte, or a bit, per token and expert."""

from __future__ import annotations

import enum

import torch

from te_hal.schema.errors import ArgumentError


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is written: bool ``[..., experts]``, or bits in uint8 ``[..., ceil(experts / 8)]``."""

    BYTEMAP = 0
    BITMAP_U8 = 1


_NAMES = {"bytemap": RoutingMapFormat.BYTEMAP, "bitmap_u8": RoutingMapFormat.BITMAP_U8}
_NUMBERS = tuple(RoutingMapFormat)


def checked_format(where: str, given: object) -> RoutingMapFormat:
    """The format that is meant: itself, its number, or its name in lower case.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(given, RoutingMapFormat):
        return given
    if isinstance(given, str) and given in _NAMES:
        return _NAMES[given]
    if type(given) is int and given in _NUMBERS:
        return RoutingMapFormat(given)
    raise ArgumentError(
        f"{where}: routing_map_format",
        got=repr(given),
        accepted="RoutingMapFormat.BYTEMAP, RoutingMapFormat.BITMAP_U8, their numbers, 'bytemap', 'bitmap_u8'",
        todo="choose one",
    )


def routing_map(chosen: torch.Tensor, experts: int, written: RoutingMapFormat) -> torch.Tensor:
    """The map of chosen experts.

    Args:
        chosen: int64 ``[..., topk]``.
        experts: how many there are.
        written: how; bit ``e % 8``, from the lowest, of byte ``e // 8`` stands for expert e.
    """
    shape = (*chosen.shape[:-1], experts)
    bytemap = torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter(-1, chosen, value=True)
    if written is RoutingMapFormat.BYTEMAP:
        return bytemap
    bits = torch.nn.functional.pad(bytemap.to(torch.uint8), (0, -experts % 8)).view(*shape[:-1], -(-experts // 8), 8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return torch.bitwise_left_shift(bits, places).sum(dim=-1, dtype=torch.uint8)
