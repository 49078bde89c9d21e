"""The `te-hal` command. Its libraries come with the extra `cli`; without them it says how to get them."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: What the extra `cli` installs.
LIBRARIES = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line and exit with its status: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C.

    Ctrl-C while the command's libraries are loaded ends it in one line: in the middle of a compiled module's import it
    may come out as another error, or end the interpreter in a crash.
    """
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _end_at_once)
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


def load_app() -> Callable[[], None]:
    """Import the command line.

    Raises:
        SystemExit: 2, after a line that says what to install, without the extra `cli`.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        print(
            f'te-hal: the command line needs {", ".join(missing)}: pip install "te-hal[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    from te_hal.cli.app import app  # noqa: PLC0415 - it imports the extra's libraries

    return app
