"""update_delayed_scale against recorded histories and a loop over Python floats (docs/numerics.md, D1 to D4)."""

from __future__ import annotations

import itertools
import math
import random

import golden_values
import numpy as np
import pytest
import torch

from te_hal.backends.cpu_reference.amax import amax
from te_hal.backends.cpu_reference.delayed_scale import update_delayed_scale
from te_hal.schema.formats import FLOAT32_MAX

INF, NAN = math.inf, math.nan
STATE = golden_values.load("state")
MODULES = golden_values.load("modules_bf16")

#: Recording to (file, how the update was configured, margin, largest codes forward and backward, names of x and g).
RECORDINGS = {
    "max4": (STATE, "max", 0, (448.0, 57344.0), "g"),
    "recent4": (STATE, "most_recent", 0, (448.0, 57344.0), "g"),
    "Linear/bfloat16/delayed_hybrid_max": (MODULES, "max", 0, (448.0, 57344.0), "gy"),
    "Linear/bfloat16/delayed_e4m3_recent": (MODULES, "most_recent", 1, (448.0, 448.0), "gy"),
}


def update_by_hand(
    history: list[list[float]],
    scale: list[float],
    reduced: list[float] | None,
    fp8_max: float,
    margin: int,
    algorithm: str,
) -> None:
    for column in range(len(scale)):
        newest = history[0][column]
        if reduced is not None and reduced[column] != 0.0:
            newest = reduced[column]
        if newest == 0.0:
            continue
        past = [history[row][column] for row in range(1, len(history))] + [newest]
        for row, value in enumerate(past):
            history[row][column] = value if row else 0.0
        chosen = newest if algorithm == "most_recent" else max([v for v in past if not math.isnan(v)], default=0.0)
        if math.isfinite(chosen) and chosen > 0.0:
            with np.errstate(over="ignore"):
                quotient = float(np.float32(fp8_max * 2.0**-margin) / np.float32(chosen))
            scale[column] = FLOAT32_MAX if math.isinf(quotient) else quotient


def same(found: torch.Tensor, expected: object) -> bool:
    return torch.equal(found.nan_to_num(nan=-1.0), torch.tensor(expected, dtype=torch.float32).nan_to_num(nan=-1.0))


@pytest.mark.parametrize("recording", RECORDINGS)
def test_histories_and_scales_equal_what_was_recorded(recording: str) -> None:
    """Replays x, weight and gradient of each recorded step through amax and the update."""
    golden, algorithm, margin, largest, gradient = RECORDINGS[recording]
    weight = golden[f"{recording}/param/weight"]
    steps = [case for case in golden.cases(f"{recording}/step") if f"{case}/x" in golden]
    assert len(steps) > 2
    for direction, fp8_max in zip(("fwd", "bwd"), largest, strict=True):
        first = golden[f"{steps[0]}/meta/self/scaling_{direction}/amax_history"]
        history, scale = torch.zeros_like(first), torch.ones(first.shape[1])
        for step in steps:
            recorded = [golden[f"{step}/x"], weight] if direction == "fwd" else [golden[f"{step}/{gradient}"]]
            for slot, tensor in enumerate(recorded):
                amax(tensor, out=history[0, slot])
            update_delayed_scale(history, scale, fp8_max=fp8_max, margin=margin, amax_compute_algo=algorithm)
            after = golden.case(f"{step}/meta/self/scaling_{direction}")
            assert torch.equal(history, after["amax_history"]), (step, direction)
            assert torch.equal(scale, after["scale"]), (step, direction)


VALUES = [0.0, 1e-40, 1e-37, 2e-36, 0.5, 1.0, 3.0, 448.0, 1e30, FLOAT32_MAX, INF, NAN]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4, 17])
@pytest.mark.parametrize("reduces", [False, True], ids=["own", "reduced"])
def test_update_equals_a_loop_over_python_floats(algorithm: str, length: int, reduces: bool) -> None:
    source = random.Random(f"{algorithm}/{length}/{reduces}")  # noqa: S311 - test data
    for margin, fp8_max in itertools.product((0, 1, 3, -2), (448.0, 57344.0)):
        draw = [[source.choice(VALUES) for _ in range(50)] for _ in range(length)]
        history = torch.tensor(draw)
        rows, scales = history.tolist(), [source.choice([1.0, 0.7, FLOAT32_MAX]) for _ in range(50)]
        scale = torch.tensor(scales)
        scales = scale.tolist()
        reduced = torch.tensor([source.choice(VALUES) for _ in range(50)]) if reduces else None
        for _ in range(3):
            update_delayed_scale(
                history, scale, reduced_amax=reduced, fp8_max=fp8_max, margin=margin, amax_compute_algo=algorithm
            )
            update_by_hand(rows, scales, reduced.tolist() if reduces else None, fp8_max, margin, algorithm)
            assert same(history, rows)
            assert same(scale, scales)


def test_a_zero_amax_rolls_nothing_in_its_own_column_only() -> None:
    history, scale = torch.tensor([[0.0, 2.0], [5.0, 6.0], [7.0, 8.0]]), torch.tensor([0.5, 0.5])
    update_delayed_scale(history, scale, fp8_max=448.0)
    assert history.tolist() == [[0.0, 0.0], [5.0, 8.0], [7.0, 2.0]]
    assert scale.tolist() == [0.5, 56.0]


def test_the_newest_value_stands_last_and_the_oldest_is_dropped() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    for value in (8.0, 4.0, 2.0, 1.0):
        history[0] = value
        update_delayed_scale(history, scale, fp8_max=448.0)
    assert history.flatten().tolist() == [0.0, 2.0, 1.0]
    assert scale.item() == 448.0 / 4.0  # the window still held 4 beside what row 1 shows now


def test_an_infinity_holds_the_scale_until_it_has_left_the_window() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for value in (2.0, INF, 4.0, 4.0, 4.0):
        history[0] = value
        update_delayed_scale(history, scale, fp8_max=448.0)
        seen.append(scale.item())
    assert seen == [224.0, 224.0, 224.0, 224.0, 112.0]


def test_most_recent_forgets_an_infinity_at_once() -> None:
    history, scale = torch.zeros(3, 1), torch.ones(1)
    seen = []
    for value in (2.0, INF, 4.0):
        history[0] = value
        update_delayed_scale(history, scale, fp8_max=448.0, amax_compute_algo="most_recent")
        seen.append(scale.item())
    assert seen == [224.0, 224.0, 112.0]


def test_update_writes_in_place_and_through_strided_views() -> None:
    whole_history, whole_scale = torch.full((4, 6), 3.0), torch.ones(6)
    update_delayed_scale(whole_history[:, ::2], whole_scale[::2], fp8_max=448.0)
    assert whole_scale.tolist() == [149.33332824707031, 1.0] * 3
    assert whole_history[0].tolist() == [0.0, 3.0] * 3


def test_the_reduced_amax_may_be_a_view_of_the_history() -> None:
    history, scale = torch.tensor([[3.0], [1.0]]), torch.ones(1)
    update_delayed_scale(history, scale, reduced_amax=history[0], fp8_max=3.0)
    assert history.flatten().tolist() == [0.0, 3.0]
    assert scale.item() == 1.0


def test_no_tensors_no_work() -> None:
    history, scale = torch.zeros(4, 0), torch.ones(0)
    update_delayed_scale(history, scale, fp8_max=448.0)
    assert scale.shape == (0,)


def test_a_subnormal_amax_rolls_even_where_subnormals_are_flushed() -> None:
    history, scale = torch.tensor([[1e-40], [0.0]]), torch.ones(1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        update_delayed_scale(history, scale, fp8_max=448.0)
    finally:
        torch.set_flush_denormal(False)
    assert scale.item() == FLOAT32_MAX
    assert history.view(torch.int32).flatten().tolist() == [0, torch.tensor(1e-40).view(torch.int32).item()]


def test_a_margin_beyond_fp32_gives_the_largest_finite_scale() -> None:
    history, scale = torch.ones(2, 1), torch.ones(1)
    update_delayed_scale(history, scale, fp8_max=448.0, margin=-2000)
    assert scale.item() == FLOAT32_MAX
