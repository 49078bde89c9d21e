"""Ctrl-C (and SIGTERM) as a wish that a loop looks at between steps."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal asked to stop.

    Attributes:
        signal_number: the signal, or None.
    """

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that the signal ended: 130 for Ctrl-C."""
        return 128 + self.signal_number if self.signal_number else 0


@contextmanager
def stop_on_signal(announce: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn the first signal into a request; the second acts as if nobody had listened.

    Args:
        announce: called within the handler of the first signal.
    """
    request = StopRequest()
    former = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        request.signal_number = number
        restore()
        announce()

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield request
    finally:
        restore()
