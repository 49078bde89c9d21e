"""A comparison under way: its runs one after the other, its checkpoint, and how it stops and goes on."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from te_hal.cli.checkpoint import Checkpoint, check_same, read_checkpoint, write_checkpoint
from te_hal.cli.memory import measure_memory
from te_hal.cli.precision import precision, run_names
from te_hal.cli.results import RunResult
from te_hal.cli.training import Run
from te_hal.monitoring import NonFiniteWarning

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig
    from te_hal.cli.folder import OutFolder
    from te_hal.cli.interrupt import StopRequest
    from te_hal.cli.place import Place
    from te_hal.cli.progress import Reporter
    from te_hal.cli.results import Memory
    from te_hal.cli.text import Text
    from te_hal.shadowing import Shadow


class Comparison:
    """The runs of a comparison: done, under way, and to come.

    Args:
        config: what to train.
        place: where.
        text: on what.
        folder: where the checkpoint goes.

    Attributes:
        save_error: why the newest checkpoint could not be written, or None.
        saved_after: what the checkpoint in the folder holds, such as "step 100 of delayed"; None before the first.
    """

    def __init__(self, config: CompareConfig, place: Place, text: Text, folder: OutFolder) -> None:
        self._config, self._place, self._text, self._folder = config, place, text, folder
        self._finished: list[dict[str, Any]] = []
        self._run: Run | None = None
        self._memory: dict[str, Memory] = {}
        self.save_error: OSError | None = None
        self.saved_after: str | None = None

    @property
    def results(self) -> list[RunResult]:
        """Results of the runs done and of the one under way, in order."""
        done = [RunResult.from_dict(entry["result"]) for entry in self._finished]
        return done if self._run is None else [*done, self._run.result]

    @property
    def finished(self) -> bool:
        """Whether all runs are done."""
        return len(self._finished) == len(run_names(self._config))

    def identity(self) -> dict[str, Any]:
        """Everything that decides the numbers, by name: two comparisons of the same identity agree."""
        recipes = {f"recipe {name}": str(precision(name).recipe) for name in self._config.recipes}
        return {
            **asdict(self._config),
            "recipes": list(self._config.recipes),
            **recipes,
            "backend": self._place.backend,
            "device": self._place.device.type,
            "data": f"{self._text.name} (sha256 {self._text.sha256[:16]})",
        }

    def resume(self) -> list[str]:
        """Take over the checkpoint in the folder.

        Returns:
            What differs from the machine that wrote it, a sentence each; bit-exact continuation needs none.

        Raises:
            CheckpointError: unreadable, damaged, or of another configuration.
        """
        path = self._folder.checkpoint
        checkpoint = read_checkpoint(path)
        check_same(path, checkpoint.config, self.identity())
        self._finished = checkpoint.state["finished"]
        current = checkpoint.state["current"]
        if current is not None:
            self._run = self._new_run(current["result"]["name"])
            self._run.load_state_dict(current)
        self.saved_after = self._position()
        machine = self._place.machine()
        return [
            f"{name} was {old}, is {machine.get(name)}: the numbers may differ in the last bits"
            for name, old in checkpoint.machine.items()
            if machine.get(name) != old
        ]

    def measure(self) -> None:
        """Do two steps of each run that is left, on a copy, for the memory that they need.

        Of all runs before the first is trained: a recipe that the backend cannot run is found before an hour of
        training.

        Raises:
            UnsupportedError: the backend lacks a recipe.
        """
        for name in self._names_left():
            self._memory[name] = measure_memory(precision(name), self._config, self._text, self._place.device)

    def train(self, reporter: Reporter, stop: StopRequest, save_every: int, shadow: Shadow | None = None) -> None:
        """Do the steps that are left, or those until `stop` says so; then save.

        Signals are listened to from the first step of a run to its last checkpoint. While a model is made there is no
        step to finish: a signal acts at once then.

        An error in a step comes out as it is. Results then hold the steps done; the checkpoint stays the one before,
        because what a step has changed when it fails is no state to go on from.

        Args:
            reporter: is told of each step.
            stop: told of each step, and asked after it.
            save_every: steps between two checkpoints of a run.
            shadow: is told of each step.
        """
        for name in self._names_left():
            run = self._run = self._run or self._new_run(name)
            run.result.memory = self._memory[name]
            run.watch()
            reporter.start(run.result)
            with stop.listening(), warnings.catch_warnings():
                # The report says it.
                warnings.simplefilter("ignore", NonFiniteWarning)
                self._train_run(run, reporter, stop, save_every, shadow)
            if stop:
                return

    def _train_run(
        self, run: Run, reporter: Reporter, stop: StopRequest, save_every: int, shadow: Shadow | None
    ) -> None:
        while not run.result.finished:
            run.step()
            if shadow is not None:
                shadow.step()
            if run.evaluation_is_due:
                run.evaluate()
            reporter.step(run.result)
            stop.count_step()
            if stop:
                self._save(reporter)
                return
            if run.result.steps % save_every == 0 and not run.result.finished:
                self._save(reporter)
        run.finish()
        self._finished.append({"result": run.result.as_dict(), "model": run.model.state_dict()})
        self._run = None
        self._save(reporter)

    def _names_left(self) -> tuple[str, ...]:
        return run_names(self._config)[len(self._finished) :]

    def _position(self) -> str:
        newest = self.results[-1]
        return f"step {newest.steps} of {newest.name}"

    def _new_run(self, name: str) -> Run:
        return Run(precision(name), self._config, self._text, self._place.device)

    def _save(self, reporter: Reporter) -> None:
        """Write the checkpoint. A full disk must not end the training: the failure is noted, and kept."""
        state = {"finished": self._finished, "current": self._run.state_dict() if self._run else None}
        path = self._folder.checkpoint
        try:
            if self.saved_after is None and path.exists():
                path.replace(self._folder.earlier_checkpoint)
                reporter.note(f"kept the checkpoint of an earlier comparison as {self._folder.earlier_checkpoint}")
            write_checkpoint(path, Checkpoint(self.identity(), self._place.machine(), state))
            self.saved_after = self._position()
            self.save_error = None
        except OSError as error:
            self.save_error = error
            reporter.note(f"warning: no checkpoint written: {path}: {error.strerror}; training goes on")
