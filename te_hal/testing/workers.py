"""Runs cases in processes of their own, so that a case that crashes or hangs is named and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import StateError, TeHalError
from te_hal.testing.execute import run_case
from te_hal.testing.finding import Finding, Kind, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.context import SpawnProcess

    from te_hal.testing.case import Case
    from te_hal.testing.subject import Subject

_START_SECONDS = 120.0


def run_cases(subject: Subject, cases: Sequence[Case], *, jobs: int = 1, timeout: float = 60.0) -> Iterator[Outcome]:
    """The outcome of every case, as they come.

    Args:
        subject: the backend.
        cases: what to run.
        jobs: worker processes; 0: this process, where nothing catches a crash.
        timeout: seconds that a case may take.

    Raises:
        TeHalError: the backend cannot be used here.
        StateError: a worker ended before its first case.
    """
    if jobs == 0:
        tested = subject.prepare()
        yield from (run_case(tested, case) for case in cases)
        return
    waiting = list(reversed(cases))
    workers = [_Worker(subject, jobs) for _ in range(max(1, min(jobs, len(cases))))]
    try:
        while waiting or any(worker.case for worker in workers):
            for worker in workers:
                worker.give(waiting, timeout)
            wait([w.pipe for w in workers if w.case] + [w.process.sentinel for w in workers], timeout=0.5)
            for index, worker in enumerate(workers):
                outcome = worker.take()
                if outcome is None:
                    continue
                if not worker.process.is_alive():
                    workers[index] = _Worker(subject, jobs)
                yield outcome
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the case that it is at."""

    def __init__(self, subject: Subject, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, subject, jobs), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self._deadline = 0.0
        self._ready = False

    def give(self, waiting: list[Case], timeout: float) -> None:
        """The next case, where this one has none; the first waits for the process to be ready."""
        if self.case is not None or not waiting:
            return
        if not self._ready:
            self._begin()
        self.case = waiting.pop()
        self._deadline = time.monotonic() + timeout
        try:
            self.pipe.send(self.case)
        except OSError:
            self._deadline = 0.0

    def _begin(self) -> None:
        try:
            answer = self.pipe.recv() if self.pipe.poll(_START_SECONDS) else None
        except EOFError:
            answer = None
        if isinstance(answer, TeHalError):
            raise answer
        if answer is None:
            self.process.kill()
            raise StateError(
                "te_hal.testing",
                got=f"a worker process that ended, or did not start within {_START_SECONDS:.0f} s",
                accepted="one that loads the backend",
                todo="load the backend in this process: -j 0",
            )
        self._ready = True

    def take(self) -> Outcome | None:
        """The outcome of the case, if it has ended, or ended the process, or is beyond its time."""
        if self.case is None:
            return None
        try:
            outcome: Outcome | None = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            outcome = None
        if outcome is None:
            outcome = self._gone()
        if outcome is not None:
            self.case = None
        return outcome

    def _gone(self) -> Outcome | None:
        if self.case is None:
            return None
        if not self.process.is_alive():
            finding = Finding(Kind.CRASH, _say(self.process.exitcode))
        elif time.monotonic() > self._deadline:
            self.process.kill()
            self.process.join()
            finding = Finding(Kind.HANG, "the call was ended from outside")
        else:
            return None
        return Outcome(self.case.id, self.case.op, Status.FAILED, (finding,))

    def end(self) -> None:
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _say(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process that ran it ended by {signal.Signals(-code).name}"
    return f"the process that ran it ended with code {code}"


def _serve(pipe: Connection, subject: Subject, jobs: int) -> None:
    """A worker: takes cases until the pipe is closed."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, jobs)))
    try:
        tested = subject.prepare()
    except TeHalError as error:
        pipe.send(error)
        return
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(run_case(tested, case))
