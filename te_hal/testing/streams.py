"""Devices whose work is queued: waiting for it, and calling a kernel on a stream whose work is behind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: Side of the matrices whose product keeps a stream busy while a kernel is called.
_BUSY = 4096
_REPEATS = 8


class Streams(Protocol):
    """What the kit needs of a device with queues. A test may stand in for one."""

    def side(self) -> AbstractContextManager[object]:
        """Make a new stream the current one inside a ``with`` block; its work is behind."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Queue torch's work on the current stream."""

    def synchronize(self) -> None:
        """Wait for the side stream alone."""


class DeviceStreams:
    """The streams of a device type that torch knows.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._stream: Any = None

    @contextlib.contextmanager
    def side(self) -> Any:  # noqa: ANN401 - a context
        """See :class:`Streams`; products of large matrices keep the stream busy."""
        self._stream = self._module.Stream(self._device)
        filler = torch.ones(_BUSY, _BUSY, device=self._device)
        self._module.synchronize(self._device)
        with self._module.stream(self._stream):
            for _ in range(_REPEATS):
                filler = filler @ filler * 1e-4
            yield

    def enqueue(self, work: Callable[[], object]) -> None:
        """Torch queues by itself."""
        work()

    def synchronize(self) -> None:
        """See :class:`Streams`."""
        self._stream.synchronize()


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where it has none."""
    if device.type in ("cpu", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return DeviceStreams(device)


def wait_for(device: torch.device) -> None:
    """Until everything that was queued on the device is done; errors of it come out here."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)
