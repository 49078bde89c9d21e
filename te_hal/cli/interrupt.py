"""Ctrl-C (and SIGTERM) as a wish that a loop looks at between steps, and only while that loop runs.

Outside of it a signal ends the process from within the handler. As an exception it would come out of whatever runs: out
of a compiled module's import as another error, or as a crash of the interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from te_hal.cli.atomic import remove_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let a signal end the process with exit code 128 plus its number, in its handler.

    What was printed is flushed, half-written files are removed; nothing is unwound.
    """
    former = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        _restore(former)


def _end(number: int, _frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: the signal came while that stream was being written to.
        with suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    with suppress(OSError):
        remove_parts()
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # moving bars hide it
        os.write(2, b"te-hal compare: stopped at once\n")
    os._exit(128 + number)


def _restore(former: dict[signal.Signals, Any]) -> None:
    for number, handler in former.items():
        signal.signal(number, handler)


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

        def on_signal(number: int, _frame: FrameType | None) -> None:
            self.signal_number = number
            _restore(former)
            self._announce()

        for number in _SIGNALS:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            _restore(former)
