"""`--tensorboard DIR`: the comparison as TensorBoard shows it, a run of the comparison being a run there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from te_hal.cli.results import RunResult
    from te_hal.cli.summary import Summary

_WHERE = "te-hal compare: --tensorboard"
#: Columns of the observations that become a curve each.
_OBSERVED = ("amax", "scale", "clipped", "flushed")


class Board(NamedTuple):
    """A folder that TensorBoard reads.

    Attributes:
        path: the folder; each run has one of its own in it.
    """

    path: Path

    def write(self, summary: Summary) -> None:
        """Write every run of the comparison; TensorBoard shows it instead of what an earlier call wrote there.

        Raises:
            OSError: the folder cannot be written to.
        """
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional library

        for run in summary.runs:
            writer = SummaryWriter(str(self.path / run.name.replace(":", "-")), purge_step=0)
            try:
                _write_curves(writer, run)
                _write_observed(writer, run)
                _write_texts(writer, run, summary)
            finally:
                writer.close()


def open_tensorboard(path: Path) -> Board:
    """Make the folder, and see that the library is there.

    Raises:
        UnsupportedError: TensorBoard is not installed.
        ArgumentError: the folder cannot be made.
    """
    if find_spec("tensorboard") is None:
        raise UnsupportedError(
            _WHERE,
            got="no tensorboard in this Python",
            accepted="an installation with it",
            todo='pip install "te-hal[tensorboard]", or leave --tensorboard out',
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            _WHERE,
            got=f"{path} ({error.strerror})",
            accepted="a folder that exists or can be made",
            todo="name another",
        ) from None
    return Board(path)


def _write_curves(writer: Any, run: RunResult) -> None:  # noqa: ANN401 - a SummaryWriter
    series = {
        "loss/train": run.loss,
        "gradient/norm": run.gradient_norm,
        "learning_rate": run.learning_rate,
        "seconds_per_step": run.step_seconds,
    }
    for tag, values in series.items():
        for step, value in enumerate(values, start=1):
            writer.add_scalar(tag, value, step)
    for step, loss in run.held_out:
        writer.add_scalar("loss/held_out", loss, step)
    if run.memory is not None:
        writer.add_scalar("memory/peak_bytes", run.memory.peak_bytes, run.steps)
        for part, count in run.memory.saved_by_part.items():
            writer.add_scalar(f"memory/saved_bytes/{part}", count, run.steps)


def _write_observed(writer: Any, run: RunResult) -> None:  # noqa: ANN401 - as above
    for entry in (run.observed or {}).get("tensors", []):
        for column in _OBSERVED:
            for step, value in zip(entry["steps"], entry[column], strict=True):
                if value is not None:
                    writer.add_scalar(f"{column}/{entry['module']}/{entry['role']}", value, step)


def _write_texts(writer: Any, run: RunResult, summary: Summary) -> None:  # noqa: ANN401 - as above
    if run.sample:
        writer.add_text("sample", f"{summary.prompt}{run.sample}", run.steps)
    for verdict in summary.verdicts:
        if verdict.name == run.name:
            writer.add_text("verdict", verdict.sentence, run.steps)
