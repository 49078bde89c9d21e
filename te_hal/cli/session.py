"""One call of `te-hal compare`, from its options to its exit code."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from te_hal.cli.comparison import Comparison
from te_hal.cli.failure import FAILED, STEP_FAILURES, fail, wrong_input_ends
from te_hal.cli.folder import open_folder
from te_hal.cli.interrupt import StopRequest
from te_hal.cli.place import find_place
from te_hal.cli.plot import load_matplotlib, write_plot
from te_hal.cli.precision import run_names
from te_hal.cli.progress import make_reporter
from te_hal.cli.record import write_record
from te_hal.cli.report import print_report
from te_hal.cli.size import check_size
from te_hal.cli.summary import Summary
from te_hal.cli.text import load_text

if TYPE_CHECKING:
    from pathlib import Path

    from te_hal.cli.config import CompareConfig
    from te_hal.cli.tensorboard import Board
    from te_hal.shadowing import Shadow


class Session:
    """Everything checked that can be checked before training.

    Args:
        config: what to train.
        backend: a backend's name; None for the one in force.
        data: a text file; None for the default text.
        out: folder to write to.
        resume: go on from the checkpoint there.
        board: takes the results for TensorBoard, or None.
        shadow: runs beside the training, or None.

    Raises:
        ArgumentError, BackendNotFoundError, BackendUnavailableError, CheckpointError: see the message.
        typer.Exit: matplotlib cannot be imported.
    """

    def __init__(
        self,
        config: CompareConfig,
        *,
        backend: str | None,
        data: Path | None,
        out: Path,
        resume: bool,
        board: Board | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self._config, self._board, self._shadow = config, board, shadow
        self._place = find_place(backend)
        check_size(config, self._place.device)
        self._text = load_text(data, config.sequence)
        load_matplotlib()
        self._folder = open_folder(out, must_hold_checkpoint=resume)
        self._comparison = Comparison(config, self._place, self._text, self._folder)
        # Progress goes to stderr, so that stdout holds the report alone.
        self._screen = Console(stderr=True)
        for warning in self._comparison.resume() if resume else []:
            print(f"te-hal compare: {warning}", file=sys.stderr)

    def run(self, *, save_every: int, stop_after: int | None) -> int:
        """Train, report, write the files.

        Args:
            save_every: steps between checkpoints.
            stop_after: steps of this call, or None for all.

        Returns:
            The exit code: 0, 128 plus the signal that ended it, or 1 if a step failed or left a contract.

        Raises:
            typer.Exit: nothing was trained, or a file could not be written.
        """
        console = Console()
        console.print(self._introduction(), highlight=False, markup=False, soft_wrap=True)
        exit_code = self._train(save_every, stop_after)
        place, comparison = self._place, self._comparison
        summary = Summary(
            identity=comparison.identity(),
            machine=place.machine(),
            text=self._text,
            tokens=self._config.tokens,
            runs=comparison.results,
            finished=comparison.finished,
        )
        print_report(console, summary)
        self._write_files(console, summary)
        if self._shadow is not None:
            console.print(self._shadow.report(), highlight=False, markup=False, soft_wrap=True)
            exit_code = exit_code or (FAILED if self._shadow.difference else 0)
        if not comparison.finished:
            where = f"goes on after {comparison.saved_after}" if comparison.saved_after else "has nothing to go on from"
            console.print(f"not finished; the same command with --resume {where}", highlight=False)
        return exit_code

    def _train(self, save_every: int, stop_after: int | None) -> int:
        reporter = make_reporter(self._screen, self._config.tokens)

        def announce() -> None:
            reporter.note("stopping after this step; once more to stop at once, without a checkpoint")

        stop = StopRequest(announce, stop_after)
        try:
            with self._place.in_force():
                with wrong_input_ends():
                    self._comparison.measure()
                with self._shadow or nullcontext():
                    self._comparison.train(reporter, stop, save_every, self._shadow)
        except typer.Exit:
            raise
        except STEP_FAILURES as error:
            self._tell_failure(error)
            return FAILED
        finally:
            reporter.close()
        return stop.exit_code

    def _tell_failure(self, error: BaseException) -> None:
        """Say where training ended; without any result there is nothing to report, and the command ends here."""
        results = self._comparison.results
        if not results:
            fail(f"te-hal compare: failed before the first step: {error}", FAILED)
        newest = results[-1]
        place = f"{newest.name} failed after {newest.steps} of {newest.steps_planned} steps"
        print(f"te-hal compare: {place}: {error}", file=sys.stderr)

    def _write_files(self, console: Console, summary: Summary) -> None:
        folder = self._folder
        try:
            write_record(folder.record, summary)
            write_plot(folder.plot, summary)
            if self._board is not None:
                self._board.write(summary)
        except OSError as error:
            fail(f"te-hal compare: cannot write to {folder.path}: {error.strerror}", FAILED)
        if self._comparison.save_error is not None:
            fail(f"te-hal compare: cannot write {folder.checkpoint}: {self._comparison.save_error.strerror}", FAILED)
        written = [folder.record, folder.plot, *([folder.checkpoint] if self._comparison.saved_after else [])]
        files = ", ".join(path.name for path in written)
        console.print(f"{folder.path}: {files}", highlight=False, markup=False, soft_wrap=True)
        if self._board is not None:
            console.print(f"tensorboard --logdir {self._board.path}", highlight=False, markup=False, soft_wrap=True)

    def _introduction(self) -> str:
        config, text, machine = self._config, self._text, self._place.machine()
        threads = machine["threads"]
        heads = f", {config.heads} heads" if config.heads else ""
        heads += f", {config.top_k} of {config.experts} experts" if config.experts else ""
        return (
            f"model    {config.model}, width {config.width}, {config.layers} layers{heads}, sequence "
            f"{config.sequence}; {config.steps} steps of {config.tokens} bytes, seed {config.seed}\n"
            f"runs     {', '.join(run_names(config))}\n"
            f"text     {text.name}: {len(text.train):,} bytes to train on, {len(text.held_out):,} held out\n"
            f"backend  {self._place.backend} on {machine['device']}, {threads} thread{'s' * (threads > 1)}\n"
        )
