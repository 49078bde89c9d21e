"""The verdict follows the held-out losses, and says when it cannot tell."""

import math

import pytest

from te_hal.cli.results import RunResult
from te_hal.cli.verdict import judge, noise

UNIGRAM = 3.2


def run(name, held_out, *, steps=2, nonfinite=0):
    result = RunResult(name, None if name.startswith("bf16") else "a recipe", steps_planned=2)
    for _ in range(steps):
        result.record(loss=held_out, gradient_norm=1.0, lr=0.1, seconds=1.0, nonfinite=nonfinite)
    result.held_out.append((steps, held_out))
    return result


@pytest.mark.parametrize(
    ("baseline", "recipe", "trusted", "words"),
    [
        (run("bf16", 2.0), run("delayed", 2.0), True, "follows BF16"),
        (run("bf16", 2.0), run("delayed", 2.01), True, "0.50% above"),
        (run("bf16", 2.0), run("delayed", 1.9), True, "5.00% below"),
        (run("bf16", 2.0), run("delayed", 2.03), False, "falls behind BF16: held-out loss 2.0300, 1.50% above"),
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


def test_the_noise_is_how_far_apart_two_bf16_seeds_are():
    runs = [run("bf16", 2.0), run("bf16-2", 1.98), run("delayed", 2.01)]
    assert noise(runs) == pytest.approx(0.01)
    assert noise(runs[:1]) is None
    (verdict,) = judge(runs, UNIGRAM)
    assert "two BF16 seeds differ by 1.00%" in verdict.sentence


def observed(*, nonfinite=None):
    shares = {"fc1": (0.002, 0.0), "fc2": (0.05, 0.4)}
    columns = {"steps": [1, 2], "amax": [1.0, 1.0], "scale": [2.0, 2.0]}
    tensors = [
        {"module": f"layers.1.{name}", "role": "input", **columns, "clipped": [clip] * 2, "flushed": [flush] * 2}
        for name, (clip, flush) in shares.items()
    ]
    return {"tensors": tensors, "nonfinite": nonfinite}


def test_a_recipe_that_falls_behind_comes_with_the_layer_and_role_to_look_at():
    behind = run("delayed", 2.5)
    behind.observed = observed()
    (verdict,) = judge([run("bf16", 2.0), behind], UNIGRAM)
    assert "Look first at layers.1.fc2, input: 5.00% of its values were clipped, 40.00% flushed" in verdict.sentence


def test_a_recipe_that_turned_nan_comes_with_the_place_that_had_it_first():
    facts = {"module": "layers.0.fc1", "kind": "Linear", "role": "grad_output", "op": "quantize"}
    broken = run("delayed", 2.0, nonfinite=3)
    broken.observed = observed(nonfinite={"step": 2, "value": "Inf", "direction": "backward", **facts})
    (verdict,) = judge([run("bf16", 2.0), broken], UNIGRAM)
    assert "Look first at layers.0.fc1 (Linear), grad_output, quantize in backward: Inf in step 2." in verdict.sentence
