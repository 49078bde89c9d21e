"""Runs cases in processes of their own, so that a case that crashes or hangs is named and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import torch

from te_hal.dispatch.probe import ending
from te_hal.schema.errors import StateError, TeHalError
from te_hal.testing.execute import run_case
from te_hal.testing.finding import Finding, Kind, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.context import SpawnProcess

    from te_hal.testing.case import Case
    from te_hal.testing.subject import Subject

#: What loading a backend may take, its libraries included.
START_SECONDS = 120.0


def load_apart(subject: Subject, jobs: int) -> Worker:
    """A worker that has loaded the backend: whoever loads it in this process knows that it neither crashes nor hangs.

    Raises:
        TeHalError: the backend cannot be used here.
        StateError: loading it ended the process, or did not come back in time.
    """
    worker = Worker(subject, jobs)
    worker.begin()
    return worker


def run_cases(
    subject: Subject, cases: Sequence[Case], *, jobs: int = 1, timeout: float = 60.0, first: Worker | None = None
) -> Iterator[Outcome]:
    """The outcome of every case, as they come.

    Args:
        subject: the backend.
        cases: what to run.
        jobs: worker processes; 0: this process, where nothing catches a crash.
        timeout: seconds that a case may take.
        first: a worker that :func:`load_apart` has started; ended with the others.

    Raises:
        TeHalError: the backend cannot be used here.
        StateError: a worker ended, or did not start in time, before its first case.
    """
    if jobs == 0:
        tested = subject.prepare()
        yield from (run_case(tested, case) for case in cases)
        return
    # Operands that lie far apart reserve much of a device: one process alone has them, and the memory that it keeps.
    far = [case for case in reversed(cases) if case.words["memory"] == "far"]
    near = [case for case in reversed(cases) if case.words["memory"] != "far"]
    workers = [first or Worker(subject, jobs)]
    workers += [Worker(subject, jobs) for _ in range(min(jobs, len(cases)) - 1)]
    try:
        while far or near or any(worker.case for worker in workers):
            for index, worker in enumerate(workers):
                worker.give(far if far and index == 0 else near, timeout)
            wait([w.pipe for w in workers if w.case] + [w.process.sentinel for w in workers], timeout=0.5)
            for index, worker in enumerate(workers):
                outcome = worker.take()
                if outcome is None:
                    continue
                if not worker.process.is_alive():
                    workers[index] = Worker(subject, jobs)
                yield outcome
    finally:
        for worker in workers:
            worker.end()


class Worker:
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
        self._backend = subject.backend

    def give(self, waiting: list[Case], timeout: float) -> None:
        """The next case, where this one has none; the first waits for the process to be ready."""
        if self.case is not None or not waiting:
            return
        if not self._ready:
            self.begin()
        self.case = waiting.pop()
        self._deadline = time.monotonic() + timeout
        try:
            self.pipe.send(self.case)
        except OSError:
            self._deadline = 0.0

    def begin(self) -> None:
        """Wait until the process has loaded the backend.

        Raises:
            TeHalError: the backend cannot be used here.
            StateError: the process ended, or is not ready in time.
        """
        try:
            answer = self.pipe.recv() if self.pipe.poll(START_SECONDS) else None
            late = answer is None
        except EOFError:
            answer, late = None, False
        if isinstance(answer, TeHalError):
            self.end()
            raise answer
        if answer is None:
            if late:
                self.process.kill()
            self.process.join()
            raise StateError(
                f"te_hal.testing: backend {self._backend}",
                got=f"loading that takes over {START_SECONDS:g} s"
                if late
                else f"{_say(self.process.exitcode)} while loading",
                accepted="a backend, or an error that says what is missing",
                todo="look at its import, create_backend and usable(); TE_HAL_DENY=name leaves out another one",
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
        """Close the pipe, which ends an idle process, and end one that is not idle."""
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _say(code: int | None) -> str:
    return f"the process that ran it ended by {'no known cause' if code is None else ending(code)}"


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
