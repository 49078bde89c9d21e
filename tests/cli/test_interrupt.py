"""Ctrl-C at awkward moments: before the first step, between two runs, and a second time."""

import os
import signal
import subprocess
import sys
import time

import pytest

from te_hal.cli import comparison
from te_hal.cli.interrupt import StopRequest

#: Is told to stop between writing a file's content and putting it in its place.
HALF_WRITTEN = """
import os, pathlib, signal, sys
from te_hal.cli.atomic import write_atomically
from te_hal.cli.interrupt import ending_at_once
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGINT)
with ending_at_once():
    write_atomically(pathlib.Path(sys.argv[1]), b"content")
"""
SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)


def send(number):
    os.kill(os.getpid(), number)


@SIGNALS
def test_the_first_signal_is_a_wish_and_the_second_acts_as_before(number, code):
    def own_handler(received, _frame):
        seen.append(received)

    seen, announced = [], []
    former = signal.signal(number, own_handler)
    try:
        request = StopRequest(lambda: announced.append("once"))
        assert not request
        with request.listening():
            send(number)
            assert (bool(request), request.exit_code, seen) == (True, code, [])
            send(number)
        assert signal.getsignal(number) is own_handler
    finally:
        signal.signal(number, former)
    assert (seen, announced) == ([number], ["once"])


def test_outside_of_the_loop_nobody_listens():
    request = StopRequest(lambda: None)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with request.listening():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@SIGNALS
def test_a_signal_while_the_model_is_made_ends_the_command_at_once(command_line, number, code):
    process = command_line.start("--width", "16", "--layers", "20000", "--batch", "8")
    while not command_line.out.exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == code, errors
    assert "stopping after this step" not in errors
    assert "Traceback" not in errors
    assert list(command_line.out.iterdir()) == []


def test_a_signal_while_a_run_s_last_checkpoint_is_written_starts_no_other_run(command_line, monkeypatch):
    def interrupted(path, checkpoint):
        if not signalled:
            signalled.append(True)
            send(signal.SIGINT)
        write(path, checkpoint)

    signalled, write = [], comparison.write_checkpoint
    monkeypatch.setattr(comparison, "write_checkpoint", interrupted)
    result = command_line.compare()
    assert result.exit_code == 130
    assert [(run["name"], run["steps"]) for run in command_line.record()["runs"]] == [("bf16", 10)]
    assert "--resume goes on after step 10 of bf16" in result.stdout
    assert command_line.compare("--resume", "--stop-after", "1").exit_code == 0
    assert [run["steps"] for run in command_line.record()["runs"]] == [10, 1]


def test_a_step_limit_ends_the_comparison_across_runs(command_line):
    assert command_line.compare("--stop-after", "12").exit_code == 0
    assert [run["steps"] for run in command_line.record()["runs"]] == [10, 2]


#: Runs `te-hal` with the process's own arguments, and sends it two signals: within the fifth step, or one there and one
#: while the plot is drawn.
TWICE = """
import os, signal, sys
from te_hal.cli import main, plot
from te_hal.cli.training import Run

def interrupted(run):
    if run.result.steps == 5:
        for _ in range({within_the_step}):
            os.kill(os.getpid(), signal.{signal})
    step(run)

def draw(*_):
    os.kill(os.getpid(), signal.{signal})

step, Run.step, plot._draw_losses = Run.step, interrupted, draw
main()
"""


@pytest.mark.parametrize(
    ("name", "within_the_step", "left"),
    [("SIGINT", 2, ["compare.ckpt"]), ("SIGTERM", 1, ["compare.ckpt", "compare.json"])],
    ids=["within a step", "while files are written"],
)
def test_a_second_signal_stops_at_once_and_keeps_the_checkpoint_before(command_line, name, within_the_step, left):
    program = TWICE.format(signal=name, within_the_step=within_the_step)
    process = command_line.start("--checkpoint-every", "3", program=program)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + getattr(signal, name), errors
    assert "stopping after this step; once more to stop at once" in errors
    assert errors.endswith("te-hal compare: stopped at once\n")
    assert "Traceback" not in errors
    assert ("held-out" in output) is (within_the_step == 1)
    assert sorted(path.name for path in command_line.out.iterdir()) == left
    assert command_line.compare("--resume", "--stop-after", "1").exit_code == 0
    assert command_line.record()["runs"][0]["steps"] == {2: 4, 1: 7}[within_the_step]


def test_a_file_that_is_half_written_when_the_process_ends_is_removed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HALF_WRITTEN, str(tmp_path / "file")], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (130, [])


LOADING = """
import os, signal, time
import te_hal.cli as cli

def load():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)  # where another thread gets the signal, this one hears of it a little later

cli.load_app = load
cli.main()
"""


def test_ctrl_c_while_the_command_is_loaded_ends_it_in_one_line():
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "te-hal: stopped before it had started\n")


def test_a_matplotlib_that_cannot_be_imported_is_found_before_training(command_line, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command_line.compare()
    assert result.exit_code == 2
    assert "the plot needs matplotlib" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not command_line.out.exists()
