"""Ctrl-C at awkward moments: before the first step, and a second time within a step."""

import os
import signal

import pytest

from te_hal.cli import comparison
from te_hal.cli.interrupt import stop_on_signal
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
        with stop_on_signal(lambda: announced.append("once")) as request:
            assert not request
            send(number)
            assert (bool(request), request.exit_code, seen) == (True, code, [])
            send(number)
        assert signal.getsignal(number) is own_handler
    finally:
        signal.signal(number, former)
    assert (seen, announced) == ([number], ["once"])


@SIGNALS
def test_a_signal_before_the_first_step_ends_it_after_that_step(command_line, monkeypatch, number, code):
    def measured(*arguments):
        if not signalled:
            signalled.append(number)
            send(number)
        return measure(*arguments)

    signalled, measure = [], comparison.measure_memory
    monkeypatch.setattr(comparison, "measure_memory", measured)
    result = command_line.compare()
    assert result.exit_code == code
    assert "stopping after this step" in result.stderr
    assert [(run["name"], run["steps"]) for run in command_line.record()["runs"]] == [("bf16", 1)]
    assert command_line.compare("--resume", "--stop-after", "1").exit_code == 0
    assert command_line.record()["runs"][0]["steps"] == 2


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
