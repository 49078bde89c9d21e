"""The comparison that `te-hal compare` makes when it is told nothing."""

import time

import pytest
from command_line import CommandLine


@pytest.mark.slow
def test_the_defaults_end_within_six_minutes_and_fp8_stays_within_one_percent(tmp_path):
    command_line = CommandLine(tmp_path)
    started = time.monotonic()
    result = command_line.call("compare", "--out", str(command_line.out))
    assert result.exit_code == 0, result.stderr
    assert time.monotonic() - started < 360
    record = command_line.record()
    bf16, _second_seed, *recipes = record["runs"]
    assert record["config"]["model"] == "gpt"
    assert bf16["held_out_loss"] < 0.75 * record["text"]["unigram_loss"]
    for run in recipes:
        assert run["held_out_loss"] < 1.01 * bf16["held_out_loss"], run["name"]
        assert run["nonfinite_values"] == 0
    assert [verdict["trusted"] for verdict in record["verdicts"]] == [True, True]
