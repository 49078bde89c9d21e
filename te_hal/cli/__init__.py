"""The `te-hal` command. Its libraries come with the extra `cli`; without them it says how to get them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: What the extra `cli` installs.
LIBRARIES = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line and exit with its status: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C."""
    load_app()()


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
