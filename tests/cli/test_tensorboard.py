"""`--tensorboard`: refused without the library, and what it is given with it."""

import sys
import types
from typing import ClassVar

import pytest
from command_line import TINY_GPT

from te_hal.cli import tensorboard


class Writer:
    """Takes what a SummaryWriter would write."""

    folders: ClassVar = {}

    def __init__(self, folder, purge_step):
        assert purge_step == 0
        self.scalars, self.texts = {}, {}
        self.folders[folder.rpartition("/")[2]] = {"scalars": self.scalars, "texts": self.texts}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))

    def add_text(self, tag, text, step):
        self.texts[tag] = (step, text)

    def close(self):
        pass


@pytest.fixture
def written(monkeypatch):
    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.setattr(tensorboard, "find_spec", lambda _: object())
    monkeypatch.setattr(Writer, "folders", {})
    return Writer.folders


def test_without_the_library_it_is_refused_with_the_command_that_installs_it(command_line, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda _: None)
    result = command_line.compare("--tensorboard", str(tmp_path / "board"))
    assert result.exit_code == 2
    assert 'pip install "te-hal[tensorboard]"' in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not command_line.out.exists()
    assert not (tmp_path / "board").exists()


def test_a_folder_that_cannot_be_made_is_found_before_training(command_line, tmp_path, written):
    (tmp_path / "file").write_text("in the way")
    result = command_line.compare("--tensorboard", str(tmp_path / "file" / "board"))
    assert result.exit_code == 2
    assert "--tensorboard: got" in result.stderr
    assert written == {}


def test_the_curves_of_each_run_are_those_of_the_record(command_line, tmp_path, written):
    result = command_line.compare(*TINY_GPT, "--from", "bf16", "--recipe", "current", "--tensorboard", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert f"tensorboard --logdir {tmp_path}" in result.stdout.replace("\n", "")
    assert list(written) == ["bf16", "bf16-2", "current-1", "current"]
    for run, board in zip(command_line.record()["runs"], written.values(), strict=True):
        scalars = board["scalars"]
        assert scalars["loss/train"] == list(enumerate(run["loss"], start=1))
        assert scalars["gradient/norm"] == list(enumerate(run["gradient_norm"], start=1))
        assert scalars["loss/held_out"] == [tuple(pair) for pair in run["held_out"]]
        assert board["texts"]["sample"] == (10, command_line.record()["prompt"] + run["sample"])
        for entry in run["observed"]["tensors"]:
            if entry["clipped"][0] is not None:
                tag = f"clipped/{entry['module']}/{entry['role']}"
                assert scalars[tag] == list(zip(entry["steps"], entry["clipped"], strict=True))
        for part, count in run["memory"]["saved_by_part"].items():
            assert scalars[f"memory/saved_bytes/{part}"] == [(10, count)]


def test_tensorboard_itself_reads_what_is_written(command_line, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command_line.compare("--recipe", "current", "--steps", "3", "--tensorboard", str(tmp_path))
    events = accumulator.EventAccumulator(str(tmp_path / "current"))
    events.Reload()
    run = command_line.record()["runs"][-1]
    assert [event.value for event in events.Scalars("loss/train")] == pytest.approx(run["loss"], rel=1e-6)
