"""`te-hal compare` from options to files."""

import errno
import io
import math
import os
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from command_line import CommandLine
from rich.console import Console

import te_hal
from te_hal.cli import comparison
from te_hal.cli.progress import Bars, Lines, make_reporter
from te_hal.cli.results import RunResult

RUNS = ["bf16", "bf16-2", "delayed", "current"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    command_line = CommandLine(tmp_path_factory.mktemp("compare"))
    return command_line, command_line.compare()


def test_it_writes_a_record_a_plot_and_a_checkpoint(done):
    command_line, result = done
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in command_line.out.iterdir()) == ["compare.ckpt", "compare.json", "compare.png"]
    assert (command_line.out / "compare.png").read_bytes().startswith(PNG)


def test_the_table_has_a_row_per_run_and_fits_80_columns(done):
    lines = done[1].stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if "held-out" in line) :]
    for run in RUNS:
        assert any(line.split()[:1] == [run] and ("%" in line or run == "bf16") for line in table)
    assert max(len(line) for line in table if not line.startswith(str(done[0].out))) <= 80


def test_a_verdict_follows_for_each_recipe(done):
    verdicts = [line.split()[0] for line in done[1].stdout.splitlines() if "cannot be told" in line]
    assert verdicts == ["delayed", "current"]


def test_progress_goes_to_stderr_only(done):
    assert "tokens/s" in done[1].stderr
    assert "step    10/10" not in done[1].stdout


def test_the_record_says_what_made_the_numbers(done):
    record = done[0].record()
    assert record["finished"] is True
    assert record["config"]["steps"] == 10
    assert record["config"]["backend"] == "cpu_reference"
    assert "DelayedScaling" in record["config"]["recipe delayed"]
    assert record["machine"]["torch"] == torch.__version__
    assert record["machine"]["te_hal"] == te_hal.__version__
    assert record["machine"]["threads"] == torch.get_num_threads()
    age = datetime.now(timezone.utc) - datetime.fromisoformat(record["date"])
    assert timedelta(minutes=-1) < age < timedelta(minutes=10)


def test_the_record_has_a_number_per_step_of_each_run(done):
    record = done[0].record()
    assert [run["name"] for run in record["runs"]] == RUNS
    for run in record["runs"]:
        for series in ("loss", "gradient_norm", "learning_rate", "step_seconds"):
            assert len(run[series]) == 10
        assert [step for step, _ in run["held_out"]] == list(range(1, 11))
        assert run["nonfinite_values"] == 0
        assert run["memory"]["peak_bytes"] > 0


@pytest.mark.usefixtures("drawn")
def test_a_loss_that_is_not_finite_is_counted_and_reported(command_line):
    result = command_line.compare("--lr", "1e30", "--recipe", "current")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "NaN or infinite values" in words
    assert re.search(r"Look first at \S+ \(\w+\), .*: (NaN|Inf) in step \d+\.", words)
    bf16 = command_line.record()["runs"][0]
    assert bf16["nonfinite_steps"] > 0
    assert None in bf16["loss"]
    assert (command_line.out / "compare.png").read_bytes().startswith(PNG)


def test_another_text_and_fewer_recipes_can_be_chosen(command_line, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    result = command_line.compare("--data", str(text), "--recipe", "current", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    record = command_line.record()
    assert record["text"]["name"] == str(text)
    assert [run["name"] for run in record["runs"]] == ["bf16", "bf16-2", "current"]


def in_the_way(folder):
    (folder / "file").write_text("something else")
    return folder / "file"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--width", "100"], "--width: got 100; accepted: a positive multiple of 16"),
        (["--steps", "0"], "--steps: got 0"),
        (["--lr", "0"], "--lr: got 0.0"),
        (["--checkpoint-every", "0"], "--checkpoint-every: got 0"),
        (["--stop-after", "-1"], "--stop-after: got -1"),
        (["--model", "rnn"], "--model: got 'rnn'; accepted: gpt, mlp"),
        (["--heads", "4"], "--heads: got 4 for --model mlp"),
        (
            ["--model", "gpt", "--heads", "3"],
            "--heads: got 3, with --width 32; accepted: a number that divides the width",
        ),
        (["--model", "gpt", "--sequence", "63"], "--sequence: got 63; accepted: a positive multiple of 8"),
        (["--model", "gpt", "--sequence", "1024"], "accepted: at least 10320 bytes"),
        (["--from", "fp32"], "--from: got 'fp32'; accepted: bf16"),
        (["--recipe", "fp9"], "--recipe: got 'fp9'"),
        (["--backend", "null"], "--backend: got 'null', which checks arguments and computes nothing"),
        (["--data", "nowhere.txt"], "--data: got nowhere.txt (No such file or directory)"),
        (["--data", sys.executable], "not text"),
        (["--resume"], "--resume: got"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message_and_code_2_before_anything_is_written(command_line, options, complaint):
    result = command_line.compare(*options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not command_line.out.exists()


@pytest.mark.parametrize("below", [False, True], ids=["a file in the way", "a file above"])
def test_an_out_that_cannot_be_a_folder_is_found_before_training(command_line, tmp_path, below):
    file = in_the_way(tmp_path)
    result = command_line.compare("--out", str(file / "out" if below else file))
    assert result.exit_code == 2
    assert f"--out: got {file}" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert file.read_text() == "something else"


def test_an_out_that_is_read_only_is_found_before_training(command_line, tmp_path, monkeypatch):
    """The refusal is made up, because root may write everywhere."""

    def locked(path, _content):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "write_bytes", locked)
    result = command_line.compare("--out", str(tmp_path / "locked"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"--out: got {tmp_path / 'locked'} (Permission denied)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_checkpoint_that_cannot_be_written_ends_no_training(command_line, monkeypatch):
    def disk_full(_path, _checkpoint):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(comparison, "write_checkpoint", disk_full)
    result = command_line.compare("--checkpoint-every", "5", "--recipe", "current")
    assert result.exit_code == 1
    assert "current follows" in result.stdout or "current cannot be told" in result.stdout
    assert "No space left on device" in result.stderr
    assert command_line.record()["finished"] is True


def test_a_new_comparison_keeps_the_checkpoint_of_the_one_before(command_line):
    command_line.compare("--stop-after", "3")
    first = (command_line.out / "compare.ckpt").read_bytes()
    result = command_line.compare("--stop-after", "3", "--seed", "1")
    assert (command_line.out / "compare.earlier.ckpt").read_bytes() == first
    assert "kept the checkpoint of an earlier comparison" in result.stderr


def result_after(steps):
    result = RunResult("current", None, steps_planned=100)
    for _ in range(steps):
        result.record(loss=2.5, gradient_norm=1.0, lr=0.1, seconds=0.02, nonfinite=0)
    return result


def test_a_terminal_shows_bars_within_80_columns():
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    reporter = make_reporter(console, tokens=1024)
    assert isinstance(reporter, Bars)
    reporter.start(result_after(0))
    reporter.step(result_after(50))
    reporter.close()
    *_, shown, _ = re.split("(current.*?--:--)", console.export_text())
    assert "50/100 loss 2.500   20.0 ms   51,200 tok/s" in shown
    assert len(shown) <= 80


def test_elsewhere_a_line_is_printed_at_each_evaluation(capsys):
    reporter = make_reporter(Console(stderr=True), tokens=1024)
    assert isinstance(reporter, Lines)
    result = result_after(49)
    reporter.step(result)
    result = result_after(50)
    result.held_out.append((50, math.e))
    reporter.step(result)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "current  step    50/100  loss 2.5000  held-out 2.7183  20.0 ms/step  51,200 tokens/s"


def test_elsewhere_a_line_is_printed_after_20_seconds_without_one(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("te_hal.cli.progress.time.monotonic", lambda: now[0])
    reporter = Lines(Console(stderr=True), tokens=1024)
    for steps in range(1, 9):  # of 6 seconds each: a line after 24 seconds, and after 24 more
        now[0] += 6
        reporter.step(result_after(steps))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"current  step     {steps}/100  loss 2.5000  20.0 ms/step  51,200 tokens/s" for steps in (4, 8)]
