"""How long a call takes: by the device's own events where it has them, else by the process's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.testing.streams import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

#: Runs of one measurement, whatever the time allows.
_FEWEST, _MOST = 3, 200


class Timing(NamedTuple):
    """One measurement.

    Attributes:
        median_us: of a call, in microseconds.
        least_us: the shortest; what two measurements are compared by, as other work only ever adds to it.
        runs: how many calls were timed.
    """

    median_us: float
    least_us: float
    runs: int


class Clock:
    """Times calls on one device.

    Args:
        device: where they run. With events (``torch.get_device_module(device).Event``) a call's time is that between
            two of them in its stream: gaps in which the device waits for Python included, the wait for the end not.
        seconds: that a measurement may take, beside one call before it that is not timed.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        events = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._events: Any = events if hasattr(events, "Event") else None

    @property
    def kind(self) -> str:
        """What tells the time: ``events`` of the device, or the process's ``clock``."""
        return "clock" if self._events is None else "events"

    def measure(self, call: Callable[[], object]) -> Timing:
        """Time a call again and again."""
        call()
        wait_for(self._device)
        began = time.perf_counter()
        call()
        wait_for(self._device)
        once = time.perf_counter() - began
        runs = int(min(max(self._seconds / max(once, 1e-9), _FEWEST), _MOST))
        spans = sorted((self._by_clock if self._events is None else self._by_events)(call, runs))
        return Timing(spans[len(spans) // 2] * 1e6, spans[0] * 1e6, runs)

    def _by_clock(self, call: Callable[[], object], runs: int) -> list[float]:
        spans = []
        for _ in range(runs):
            began = time.perf_counter()
            call()
            wait_for(self._device)
            spans.append(time.perf_counter() - began)
        return spans

    def _by_events(self, call: Callable[[], object], runs: int) -> list[float]:
        """Seconds; all calls are queued before the first is waited for."""
        with self._events.device(self._device):  # an event belongs to the current device's stream
            pairs = [[self._events.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
            for begin, end in pairs:
                begin.record()
                call()
                end.record()
            self._events.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
