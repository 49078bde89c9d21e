"""Ctrl-C at awkward moments: before the first step, between two runs, and a second time within a step."""

import os
import signal
import time

import pytest

from te_hal.cli import comparison
from te_hal.cli.interrupt import StopRequest
from te_hal.cli.training import Run

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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"]
)
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


def test_a_second_ctrl_c_within_a_step_stops_at_once_and_keeps_the_checkpoint_before(command_line, monkeypatch):
    def interrupted(run):
        if run.result.steps == 5:
            send(signal.SIGINT)
            send(signal.SIGINT)
        step(run)

    step = Run.step
    with monkeypatch.context() as patched:
        patched.setattr(Run, "step", interrupted)
        result = command_line.compare("--checkpoint-every", "3")
    assert result.exit_code == 130
    assert "stopping after this step; once more to stop at once" in result.stderr
    assert "held-out" not in result.stdout
    assert [path.name for path in command_line.out.iterdir()] == ["compare.ckpt"]
    assert command_line.compare("--resume", "--stop-after", "1").exit_code == 0
    assert command_line.record()["runs"][0]["steps"] == 4
