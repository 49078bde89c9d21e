"""Ctrl-C (and SIGTERM) as a wish that a loop looks at between steps, and only while that loop runs."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether training is to end: a signal asked for it, or enough steps are done.

    Args:
        announce: called within the handler of the first signal.
        after: steps to do, or None for no limit.

    Attributes:
        signal_number: the signal, or None.
    """

    def __init__(self, announce: Callable[[], None], after: int | None = None) -> None:
        self.signal_number: int | None = None
        self._announce, self._after, self._steps = announce, after, 0

    def __bool__(self) -> bool:
        return self.signal_number is not None or self._steps == self._after

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that the signal ended: 130 for Ctrl-C."""
        return 128 + self.signal_number if self.signal_number else 0

    def count_step(self) -> None:
        """A step is done."""
        self._steps += 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn the first signal into a request; the second, and any outside, acts as if nobody had listened."""
        former = {number: signal.getsignal(number) for number in _SIGNALS}

        def restore() -> None:
            for number, handler in former.items():
                signal.signal(number, handler)

        def on_signal(number: int, _frame: FrameType | None) -> None:
            self.signal_number = number
            restore()
            self._announce()

        for number in _SIGNALS:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            restore()
