"""Observations of a run: put together over checkpoints, and read for where FP8 cuts off most."""

import pytest

from te_hal.cli.observed import Lost, first_to_look_at, joined, losses_of_format


def series(module, role, clipped, flushed, first=1):
    count = len(clipped)
    return {
        "module": module,
        "role": role,
        "basis": "values",
        "steps": list(range(first, first + count)),
        "amax": [1.0] * count,
        "scale": [2.0] * count,
        "clipped": clipped,
        "flushed": flushed,
    }


def history(*tensors, steps=(1, 2, 3, 4), nonfinite=None):
    return {
        "format": 1,
        "every": 1,
        "steps": list(steps),
        "gradient_norm": [0.5] * len(steps),
        "tensors": list(tensors),
        "nonfinite": nonfinite,
    }


def test_two_histories_are_one_after_the_other():
    first = history(series("a", "input", [0.1], [0.2]), steps=[1], nonfinite={"step": 1})
    second = history(series("a", "input", [0.3], [0.4], 2), series("b", "input", [0.5], [0.6], 2), steps=[2])
    both = joined(first, second)
    assert both["steps"] == [1, 2]
    assert both["gradient_norm"] == [0.5, 0.5]
    assert both["nonfinite"] == {"step": 1}
    assert both["tensors"] == [series("a", "input", [0.1, 0.3], [0.2, 0.4]), series("b", "input", [0.5], [0.6], 2)]
    assert first["tensors"] == [series("a", "input", [0.1], [0.2])]


def test_shares_are_means_over_the_second_half_of_the_steps():
    observed = history(series("a", "input", [1.0, 1.0, 0.1, 0.3], [1.0, 1.0, 0.2, 0.2]))
    (found,) = losses_of_format(observed)
    assert found == Lost("a", "input", pytest.approx(0.2), pytest.approx(0.2))


def test_what_is_not_quantized_has_no_shares():
    assert losses_of_format(history(series("a", "output", [None] * 4, [None] * 4))) == []
    assert first_to_look_at(None) is None


@pytest.mark.parametrize(
    ("clipped", "flushed", "expected"),
    [
        ([0.0, 0.02], [0.9, 0.0], ("b", "input")),
        ([0.0, 0.0009], [0.9, 0.0], ("a", "input")),
        ([0.0, 0.0], [0.1, 0.3], ("b", "input")),
    ],
    ids=["much is clipped", "little is clipped", "nothing is clipped"],
)
def test_clipping_is_looked_at_before_flushing_where_it_is_much(clipped, flushed, expected):
    places = [series(name, "input", [c] * 4, [f] * 4) for name, c, f in zip("ab", clipped, flushed, strict=True)]
    assert first_to_look_at(history(*places))[:2] == expected
