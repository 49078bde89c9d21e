"""Starts the `te-hal` command.

It stands beside the package, because whatever is imported from that imports torch first, which takes seconds. A Ctrl-C
in the middle of a compiled module's import may come out as another error, or end the interpreter in a crash.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line, as `te_hal.cli.main`; Ctrl-C while that is loaded ends in one line and exit code 130."""
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _end_at_once)
    from te_hal.cli import load_app  # noqa: PLC0415 - the reason for this file

    app = load_app()
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    finally:
        if listens:
            # Nothing is left to do, and no exception has a place to go while the interpreter is taken down.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_at_once(number: int, _frame: object) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"te-hal: stopped before it had started\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
