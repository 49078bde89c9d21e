"""The verdict follows the held-out losses, and says when it cannot tell."""

import math

import pytest

from te_hal.cli.results import RunResult
from te_hal.cli.verdict import judge

UNIGRAM = 3.2


def run(name, held_out, *, steps=2, nonfinite=0):
    result = RunResult(name, None if name == "bf16" else "a recipe", steps_planned=2)
    for _ in range(steps):
        result.record(loss=held_out, gradient_norm=1.0, lr=0.1, seconds=1.0, nonfinite=nonfinite)
    result.held_out.append((steps, held_out))
    return result


@pytest.mark.parametrize(
    ("baseline", "recipe", "trusted", "words"),
    [
        (run("bf16", 2.0), run("delayed", 2.0), True, "follows BF16"),
        (run("bf16", 2.0), run("delayed", 2.03), True, "1.50% above"),
        (run("bf16", 2.0), run("delayed", 1.9), True, "5.00% below"),
        (run("bf16", 2.0), run("delayed", 2.05), False, "falls behind BF16"),
        (run("bf16", 2.0), run("delayed", math.nan), False, "NaN or infinite values in 2 of 2 steps, first in step 1"),
        (run("bf16", 2.0), run("delayed", 2.0, nonfinite=3), False, "6 NaN or infinite values"),
        (run("bf16", 2.0), run("delayed", 2.0, steps=1), None, "stopped after 1 of 2 steps"),
        (run("bf16", 3.1), run("delayed", 3.1), None, "learned too little"),
        (run("bf16", math.nan), run("delayed", 2.0), None, "BF16 itself"),
        (run("bf16", math.nan), run("delayed", math.nan), False, "BF16 has them from step 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_is_judged_by_its_distance_from_bf16(baseline, recipe, trusted, words):
    (verdict,) = judge([baseline, recipe], UNIGRAM)
    assert verdict.name == "delayed"
    assert verdict.trusted is trusted
    assert words in verdict.sentence


def test_only_runs_with_a_recipe_are_judged():
    fp32 = RunResult("fp32", None, steps_planned=2)
    assert judge([run("bf16", 2.0), fp32], UNIGRAM) == []
