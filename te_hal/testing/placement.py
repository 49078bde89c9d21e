"""Operands in memory of their own: laid out as a case says, with bytes around them that nobody may touch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import OpSchema

#: Bytes on either side of a buffer; a multiple of every alignment in use.
MARGIN = 512
_SENTINEL = 0xA5
_FAR = 2**31


@dataclass
class Guard:
    """One operand's memory: where it lies, and what it held before the call.

    Attributes:
        name: of the operand.
        arena: every byte, margins and gaps included.
        before: a copy of it from before the call.
        mine: uint8, 1 where a byte belongs to an element; None for a written operand laid out densely.
        written: whether the elements may change.
    """

    name: str
    arena: torch.Tensor
    before: torch.Tensor
    mine: torch.Tensor
    written: bool

    def damage(self) -> str:
        """What changed that should not have; empty: nothing."""
        changed = (self.arena != self.before).cpu()
        outside = int((changed & (self.mine == 0)).sum())
        if outside:
            place = int((changed & (self.mine == 0)).nonzero()[0])
            inside = self.mine.nonzero()
            end = int(inside[-1]) + 1 if inside.numel() else MARGIN
            where = f"{place - end} bytes past its end" if place >= end else f"at byte {place - MARGIN} from its start"
            return f"{outside} bytes around operand {self.name} were overwritten, the first {where}"
        if not self.written and bool(changed.any()):
            return f"operand {self.name}, which is only read, was changed in {int(changed.sum())} bytes"
        return ""


@dataclass
class Placed:
    """The arguments of one call, and the guards of their memory."""

    arguments: dict[str, Any]
    guards: list[Guard]

    def damage(self) -> list[str]:
        """What the guards say."""
        return [said for said in (guard.damage() for guard in self.guards) if said]


def place(schema: OpSchema, arguments: Mapping[str, Any], memory: str, device: torch.device) -> Placed:
    """Put every operand on a device, in the layout that ``memory`` names.

    Operands of one element, written storages and operands that the layout does not fit are dense.
    """
    placed = Placed(dict(arguments), [])
    for operand in schema.operands:
        value = arguments[operand.name]
        if value is None:
            continue
        held = _Placing(operand.name, memory, device, operand.written, placed.guards, {})
        placed.arguments[operand.name] = [held.put(item) for item in value] if operand.many else held.put(value)
    return placed


@dataclass
class _Placing:
    name: str
    memory: str
    device: torch.device
    written: bool
    guards: list[Guard]
    #: Buffers that stand for one tensor stay one tensor.
    known: dict[int, torch.Tensor]

    def put(self, value: Any) -> Any:  # noqa: ANN401 - a tensor or a storage
        if isinstance(value, QuantizedStorage):
            tensors = tuple(None if t is None else self._tensor(t) for t in value.tensors())
            return value.with_tensors(tensors)
        return self._tensor(value)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self.known:
            memory = self.memory if value.dim() or self.memory == "offset" else "dense"
            if memory == "far" and (self.written or not _can_be_far(value)):
                memory = "dense"
            self.known[id(value)] = self._far(value) if memory == "far" else self._near(value, memory)
        return self.known[id(value)]

    def _near(self, value: torch.Tensor, memory: str) -> torch.Tensor:
        size = value.element_size()
        strides = _strides(value.shape, memory)
        extent = _extent(value.shape, strides) * size
        start = MARGIN + (size if memory == "offset" else 0)
        whole = -(-(start + extent + MARGIN) // MARGIN) * MARGIN
        arena = torch.full((whole,), _SENTINEL, dtype=torch.uint8, device=self.device)
        mine = torch.zeros(whole, dtype=torch.uint8)
        seen = _elements(arena, value, start, strides)
        seen.copy_(value)
        if value.numel():
            # As bytes: the strides of elements, and the bytes of each.
            mine.as_strided((*value.shape, size), (*(s * size for s in strides), 1), start).fill_(1)
        self.guards.append(Guard(self.name, arena, arena.clone(), mine, self.written))
        return seen

    def _far(self, value: torch.Tensor) -> torch.Tensor:
        """Rows so far apart that the last element's index is beyond 2**31. Untouched memory costs nothing on a host."""
        step = -(-_FAR // (value.shape[0] - 1))
        strides = (step, *_strides(value.shape, "dense")[1:])
        arena = torch.empty(_extent(value.shape, strides), dtype=value.dtype, device=self.device)
        seen = arena.as_strided(value.shape, strides)
        seen.copy_(value)
        return seen


def _elements(arena: torch.Tensor, value: torch.Tensor, start: int, strides: tuple[int, ...]) -> torch.Tensor:
    """A view of the arena's bytes as elements like ``value``'s; of an address that is aligned to one element."""
    size = value.element_size()
    return arena.view(value.dtype).as_strided(value.shape, strides, start // size)


def _strides(shape: torch.Size, memory: str) -> tuple[int, ...]:
    sizes = list(shape) if memory != "turned" else list(reversed(shape))
    strides, step = [], 2 if memory == "strided" else 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(strides) if memory == "turned" else tuple(reversed(strides))


def _extent(shape: torch.Size, strides: tuple[int, ...]) -> int:
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _can_be_far(value: torch.Tensor) -> bool:
    return value.dim() > 1 and value.shape[0] > 1 and value.numel() > 0


def has_room(device: torch.device, arguments: Mapping[str, Any]) -> bool:
    """Whether the memory that "far" operands reserve is there: twice all of them, for the call and its repetition.

    On a host only their elements are touched, and each needs its addresses.
    """
    given = [item for value in arguments.values() for item in (value if isinstance(value, list | tuple) else [value])]
    tensors = [t for item in given for t in (item.tensors() if isinstance(item, QuantizedStorage) else (item,))]
    sizes = [_FAR * t.element_size() for t in tensors if isinstance(t, torch.Tensor) and _can_be_far(t)]
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > max(sizes, default=0)
    module = torch.get_device_module(device)
    module.empty_cache()
    free, _ = module.mem_get_info(device)
    return bool(free > 2 * sum(sizes))
