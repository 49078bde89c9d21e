"""Results of a run: what a step adds, and the numbers made from the series."""

import math

import pytest

from te_hal.cli.results import Memory, RunResult


def run_with(losses, nonfinite=()):
    result = RunResult("bf16", None, steps_planned=30)
    for step, loss in enumerate(losses):
        count = nonfinite[step] if step < len(nonfinite) else 0
        result.record(loss=loss, gradient_norm=2 * loss, lr=0.1, seconds=step + 1.0, nonfinite=count)
    return result


def test_the_losses_shown_are_means_of_the_last_twenty_steps():
    result = run_with([float(step) for step in range(30)])
    assert result.last_loss == 19.5
    assert result.last_gradient_norm == 39.0
    assert result.median_step_seconds == 15.5
    assert result.finished


def test_a_run_that_has_not_started_has_no_numbers():
    result = run_with([])
    assert not result.finished
    for value in (result.last_loss, result.held_out_loss, result.last_gradient_norm, result.median_step_seconds):
        assert math.isnan(value)


def test_nan_and_infinite_values_are_counted_with_the_step_that_had_them_first():
    result = run_with([1.0, math.nan, 2.0, math.inf], nonfinite=[0, 5, 0, 0])
    assert (result.nonfinite_values, result.nonfinite_steps, result.first_nonfinite_step) == (7, 2, 2)


@pytest.mark.parametrize("memory", [None, Memory(1, 2, 3, 4, {"layers.0": 3}, 5, "counted")])
def test_a_result_survives_its_dictionary(memory):
    result = run_with([3.0, 2.0])
    result.memory = memory
    result.held_out.append((2, 2.5))
    assert RunResult.from_dict(result.as_dict()) == result
