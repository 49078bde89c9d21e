"""What operands hold, changed in place and back; and whether two calls' results lie in memory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.storage import QuantizedStorage
from te_hal.testing.finding import Finding, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from te_hal.testing.placement import Placed


def operand_tensors(placed: Placed) -> list[torch.Tensor]:
    """Every tensor of every operand, in the order of the arguments."""
    return _tensors_of(placed.arguments.values())


def own_tensors(found: dict[str, Any], placed: Placed) -> dict[str, list[torch.Tensor]]:
    """What the kernel allocated, by result: the tensors with elements of results that are no operands."""
    given = {id(item) for value in placed.arguments.values() for item in _items(value)}
    return {
        name: [t for t in _tensors_of([value]) if t.numel()] for name, value in found.items() if id(value) not in given
    }


class OtherContents:
    """Operands that hold other values of the same kinds, in the same memory, until they are restored.

    Floating-point values are halved: a positive scale stays one, NaN stays NaN. Codes and block exponents move by one
    element. Integers beside them, which may be sizes or places, and what an op writes stay.

    Args:
        placed: the operands; changed at once.
        written: names of operands that the op writes.
    """

    def __init__(self, placed: Placed, written: frozenset[str]) -> None:
        self._before = [(t, t.clone(memory_format=torch.contiguous_format)) for t in operand_tensors(placed)]
        for name, value in placed.arguments.items():
            for item in _items(value) if name not in written else ():
                for tensor in _tensors_of([item]):
                    _change(tensor, is_coded=isinstance(item, QuantizedStorage))

    def restore(self) -> None:
        """Write back what every operand held, those that the op writes included."""
        for tensor, held in self._before:
            tensor.copy_(held)


def shared_memory(first: dict[str, list[torch.Tensor]], later: dict[str, list[torch.Tensor]]) -> list[Finding]:
    """Results of an earlier call whose memory a later call's results lie in, while somebody may still read them."""
    ends = [_range(tensor) for tensors in later.values() for tensor in tensors]
    return [
        Finding(Kind.SHARED, f"{name} lies in memory that a later call hands out again: every result has its own")
        for name, tensors in first.items()
        if any(start < end and begin < stop for start, stop in map(_range, tensors) for begin, end in ends)
    ]


def _change(tensor: torch.Tensor, *, is_coded: bool) -> None:
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor.mul_(0.5)
    elif is_coded:
        codes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        codes.copy_(codes.reshape(-1).roll(1).view(codes.shape))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one behind the last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _items(value: Any) -> list[Any]:  # noqa: ANN401 - any argument
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Without autograd's notes, which a kernel may have made."""
    found: list[torch.Tensor] = []
    for item in (item for value in values for item in _items(value)):
        if isinstance(item, QuantizedStorage):
            found += [t.detach() for t in item.tensors() if t is not None]
        elif isinstance(item, torch.Tensor):
            found.append(item.detach())
    return found
