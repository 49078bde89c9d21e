"""Memory that a kernel asks torch for, watched: poisoned before it is handed over, with sentinels around it."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from te_hal.testing.placement import MARGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.schema.backend import Allocator

_SENTINEL = 0x3C
#: Beyond, the copies would cost more than they show.
_LARGEST = 1 << 28
_WATCHED = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty})


class WatchedAllocation(TorchFunctionMode):
    """While it is entered, torch.empty and its like give poisoned memory with sentinels on both sides.

    Only in the thread that entered it, and only of allocations that go through torch's own functions: what a kernel
    library allocates for itself is not seen, and a private way of torch's only under :func:`through_torch`.

    Args:
        poison: the byte that new memory is filled with.
    """

    def __init__(self, poison: int) -> None:
        super().__init__()
        self._poison = poison
        self._arenas: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        """Stand in for what the function makes, if that is plain memory."""
        del types
        made = function(*args, **(kwargs or {}))
        if function not in _WATCHED or (kwargs or {}).get("out") is not None:
            return made
        return self._stand_in(made) if _is_plain(made) else made

    def _stand_in(self, made: torch.Tensor) -> torch.Tensor:
        size = made.numel() * made.element_size()
        whole = -(-(2 * MARGIN + size) // MARGIN) * MARGIN
        arena = torch.full((whole,), _SENTINEL, dtype=torch.uint8, device=made.device)
        arena[MARGIN : MARGIN + size].fill_(self._poison)
        self._arenas.append((arena, size))
        return arena.view(made.dtype).as_strided(made.shape, made.stride(), MARGIN // made.element_size())

    def damage(self) -> list[str]:
        """What was written outside the memory that was handed over."""
        found = []
        for arena, size in self._arenas:
            before = int((arena[:MARGIN] != _SENTINEL).sum())
            after = int((arena[MARGIN + size :] != _SENTINEL).sum())
            if before or after:
                found.append(f"{before} bytes in front of and {after} behind a buffer of {size} bytes were overwritten")
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in watched memory."""
        start = tensor.untyped_storage().data_ptr()
        return any(arena.untyped_storage().data_ptr() == start for arena, _ in self._arenas)


@contextlib.contextmanager
def through_torch(allocator: Allocator | None) -> Iterator[None]:
    """While it is entered, a backend's own allocator takes memory from torch.empty, which can be watched.

    Args:
        allocator: the backend's; None: it has none.
    """
    if allocator is None:
        yield
        return
    own = allocator.empty
    allocator.empty = lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device)
    try:
        yield
    finally:
        allocator.empty = own


def _is_plain(made: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(made, torch.Tensor)
        and made.layout is torch.strided
        and made.device.type != "meta"
        and not made.requires_grad
        and not made.is_quantized
        and 0 < made.numel() < _LARGEST
        and _is_dense(made)
    )


def _is_dense(made: torch.Tensor) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
    return extent == math.prod(made.shape)
