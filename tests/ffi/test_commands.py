"""Commands of a build: all of their output, and what ends them."""

from __future__ import annotations

import os
import subprocess
import time

from te_hal.ffi.commands import run_together


def test_each_command_is_told_with_its_status_and_what_it_printed_to_either_stream():
    commands = [["sh", "-c", f"echo out {i}; echo err {i} >&2; exit {i}"] for i in range(4)]
    ended = {each.status: each for each in run_together(commands)}
    assert [ended[i].command for i in range(4)] == commands
    assert [sorted(ended[i].output.split("\n")) for i in range(4)] == [["", f"err {i}", f"out {i}"] for i in range(4)]


def test_a_caller_that_stops_ends_what_still_runs_and_what_that_started(tmp_path):
    mark = tmp_path / "mark"
    commands = [["true"], ["sh", "-c", f"echo $$ > {mark}; sleep 60 & wait"]]
    together = run_together(commands)
    next(together)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    together.close()
    listing = ["ps", "-o", "stat=", "-g", mark.read_text().strip()]
    states = subprocess.run(listing, check=False, stdout=subprocess.PIPE, text=True).stdout.split()
    assert [state for state in states if not state.startswith("Z")] == []


def test_a_command_that_ends_while_the_others_are_being_ended_is_no_error(monkeypatch):
    """It is seen alive, and has gone when it is to be killed: its own thread has waited for it in between."""
    gone = []

    def late(group: int, _signal: int) -> None:
        gone.append(group)
        raise ProcessLookupError(3, os.strerror(3))

    monkeypatch.setattr(os, "killpg", late)
    together = run_together([["true"], ["sleep", "0.5"]])
    assert next(together).status == 0
    together.close()
    assert len(gone) == 1
