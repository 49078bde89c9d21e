"""How a command ends when it cannot do what was asked: one message on stderr and an exit code."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from te_hal.schema.errors import KernelError, TeHalError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Exit codes, as shells and Python's own tools use them.
FAILED, WRONG_INPUT = 1, 2

#: What a training step raises although its input was right: a kernel, a backend's late no, torch's own errors such
#: as memory that has run out.
STEP_FAILURES = (TeHalError, RuntimeError, MemoryError)


@contextmanager
def wrong_input_ends() -> Iterator[None]:
    """Turn an error that te_hal raises on purpose into its message and exit code 2; 1 if a kernel failed."""
    try:
        yield
    except TeHalError as error:
        fail(str(error), FAILED if isinstance(error, KernelError) else WRONG_INPUT)


def fail(message: str, code: int) -> None:
    """Print `message` to stderr and exit.

    Raises:
        typer.Exit: always.
    """
    print(message if message.startswith("te-hal") else f"te-hal: {message}", file=sys.stderr)
    raise typer.Exit(code)
