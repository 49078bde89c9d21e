"""Commands of a build that run at the same time; the first that fails ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


@dataclass(frozen=True)
class Ended:
    """A command that has ended, its exit status, and all that it printed to either stream."""

    command: Sequence[str]
    status: int
    output: str


def run_together(commands: Sequence[Sequence[str]]) -> Generator[Ended, None, None]:
    """Run commands that do not depend on each other, as many at a time as there are cores.

    Args:
        commands: program and arguments of each, started in this order.

    Yields:
        Each command as it ends. Whatever still runs when the caller closes the iterator is killed, with the processes
        that it started: a compiler's driver would leave the compiler proper behind.
    """
    started: list[subprocess.Popen[str]] = []
    starting = Lock()
    stopped = Event()

    def run(command: Sequence[str]) -> Ended:
        with starting:
            if stopped.is_set():
                return Ended(command, -signal.SIGKILL, "")
            process = _start(command)
            started.append(process)
        output, _ = process.communicate()
        return Ended(command, process.returncode, output)

    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        for future in as_completed([pool.submit(run, command) for command in commands]):
            yield future.result()
    finally:
        stopped.set()
        with starting:
            for process in started:
                if process.poll() is None:
                    _kill(process)
        pool.shutdown(wait=True, cancel_futures=True)


def _kill(process: subprocess.Popen[str]) -> None:
    """With what it started. One that its own thread has seen end since has no group any more."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a session of its own, so that it can be killed with what it starts."""
    return subprocess.Popen(  # noqa: S603 - a compiler found by toolchains.py
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
