"""Moving memory between a device and the host, beside what the device computes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from types import ModuleType


class Transfer(Protocol):
    """Who moves. Buffers are one-dimensional bytes."""

    def takes(self, device: torch.device) -> bool:
        """Whether memory of this device is moved."""
        ...

    def to_host(self, buffer: torch.Tensor) -> Any:  # noqa: ANN401 - what to_device takes
        """A copy on the host, on its way; the buffer may be freed once the caller lets go of it."""
        ...

    def to_device(self, copy: Any) -> torch.Tensor:  # noqa: ANN401 - from to_host
        """A copy of that on the device, on its way."""
        ...

    def await_device(self, buffer: torch.Tensor) -> None:
        """Have what the caller launches next wait for a buffer of :meth:`to_device`."""
        ...

    def release(self, copy: Any) -> None:  # noqa: ANN401 - from to_host
        """Nobody reads this copy any more."""
        ...


class StreamTransfer:
    """Copies on a stream of its own, to pinned memory and back.

    Args:
        stream: the stream; None: one is made on the first device that is met.
        retain: keep pinned memory for the next copies instead of giving it back.
    """

    def __init__(self, stream: Any = None, *, retain: bool = False) -> None:  # noqa: ANN401 - torch.Stream, or a device's own
        self._stream = stream
        self._retain = retain
        self._pool: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def takes(self, device: torch.device) -> bool:
        """Every device but the host itself, and the one without memory."""
        return device.type not in ("cpu", "meta")

    def to_host(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
        """As Transfer has it; ordered after what the current stream has launched."""
        module, stream = self._place(buffer.device)
        pool = self._pool[buffer.numel()]
        host = pool.pop() if pool else torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True)
        stream.wait_stream(module.current_stream(buffer.device))
        with module.stream(stream):
            host.copy_(buffer, non_blocking=True)
        buffer.record_stream(stream)
        return host, buffer.device

    def to_device(self, copy: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
        """As Transfer has it; ordered after the copy to the host, which ran on the same stream."""
        host, device = copy
        module, stream = self._place(device)
        with module.stream(stream):
            buffer = torch.empty(host.numel(), dtype=torch.uint8, device=device)
            buffer.copy_(host, non_blocking=True)
        return buffer

    def await_device(self, buffer: torch.Tensor) -> None:
        """As Transfer has it."""
        module, stream = self._place(buffer.device)
        current = module.current_stream(buffer.device)
        current.wait_stream(stream)
        buffer.record_stream(current)

    def release(self, copy: tuple[torch.Tensor, torch.device]) -> None:
        """Keep the pinned memory, if that is wanted."""
        if self._retain:
            self._pool[copy[0].numel()].append(copy[0])

    def _place(self, device: torch.device) -> tuple[ModuleType, Any]:
        module: Any = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device=device)
        return module, self._stream
