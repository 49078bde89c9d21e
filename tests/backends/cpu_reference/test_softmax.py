"""softmax of cpu_reference against a loop over rows in float64, autograd, and recorded values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import golden_values
import pytest
import torch
from closeness import FP32_ROUNDING, relative_error, roundings
from hypothesis import given, settings
from hypothesis import strategies as st

from te_hal.backends.cpu_reference.softmax import softmax_bwd, softmax_fwd
from te_hal.schema.formats import FLOATS
from te_hal.schema.softmax import CAUSAL, SOFTMAX_BWD, SOFTMAX_FWD

NAN, INF = float("nan"), float("inf")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def visible_keys(queries: int, keys: int, causal: str, window: tuple[int, int]) -> list[list[bool]]:
    """By the definition, pair by pair: seen[i][j] says whether query i sees key j."""
    offset = keys - queries if causal == "bottom_right" else 0
    seen = []
    for i in range(queries):
        row = []
        for j in range(keys):
            distance = j - (i + offset)
            sees = not (causal != "none" and distance > 0)
            sees = sees and not (window[0] >= 0 and distance < -window[0])
            row.append(sees and not (window[1] >= 0 and distance > window[1]))
        seen.append(row)
    return seen


def softmax_of_row(scores: list[float], seen: list[bool]) -> list[float]:
    shown = [score for score, sees in zip(scores, seen, strict=True) if sees]
    if not shown:
        return [0.0] * len(scores)
    largest = max(shown)
    total = math.fsum(math.exp(score - largest) for score in shown)
    return [math.exp(s - largest) / total if sees else 0.0 for s, sees in zip(scores, seen, strict=True)]


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    causal=st.sampled_from(CAUSAL),
    window=st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
    mask_shape=st.sampled_from([None, "full", "keys", "queries", "one"]),
    scale=st.sampled_from([1.0, 0.125, -2.0]),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
)
def test_masks_of_all_kinds_combine_as_defined(
    sizes: tuple[int, int],
    causal: str,
    window: tuple[int, int],
    mask_shape: str | None,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    queries, keys = sizes
    scores = draw(2, queries, keys, seed=queries * keys).to(dtypes[0])
    shapes = {"full": (2, queries, keys), "keys": (keys,), "queries": (2, queries, 1), "one": (1, 1, 1)}
    mask = None if mask_shape is None else draw(*shapes[mask_shape], seed=1) > 0.3
    hidden = torch.zeros(2, queries, keys, dtype=torch.bool) if mask is None else mask.expand(2, queries, keys)
    seen = torch.tensor(visible_keys(queries, keys, causal, window)) & ~hidden
    expected = torch.tensor(
        [
            [
                softmax_of_row((scores[b, i].double() * scale).tolist(), seen[b, i].tolist())
                for i in range(queries)
            ]
            for b in range(2)
        ]
    ).double()  # fmt: skip
    result = softmax_fwd(scores, mask=mask, scale=scale, causal=causal, window=window, out_dtype=dtypes[1])
    assert torch.equal(result == 0.0, ~seen)
    assert roundings(result, expected, 32 * FP32_ROUNDING * expected) <= 1.0


@pytest.mark.parametrize("spread", [1, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_forward_and_backward_keep_their_bounds(dtype: torch.dtype, spread: int) -> None:
    scores, grad = (draw(4, 16, 333) * spread).to(dtype), draw(4, 16, 333, seed=1).to(dtype)
    leaf = scores.double().requires_grad_()
    expected = torch.softmax(leaf * 0.7, -1)
    expected.backward(grad.double())
    output = softmax_fwd(scores, scale=0.7)
    assert relative_error(output, expected.detach()) <= SOFTMAX_FWD.contract.bound[dtype]
    # The backward is held against the exact gradient at the probabilities it was given.
    given_output = softmax_fwd(scores, scale=0.7, out_dtype=torch.float32)
    grad_input = softmax_bwd(grad, given_output, scale=0.7)
    assert grad_input.dtype == dtype
    assert leaf.grad is not None
    assert relative_error(grad_input, leaf.grad) <= SOFTMAX_BWD.contract.bound[dtype]


@pytest.mark.parametrize("case", ["plain", "causal"])
def test_matches_the_recorded_values(case: str) -> None:
    recorded = golden_values.load("functional").case(f"softmax/{case}/bfloat16")
    output = softmax_fwd(recorded["x"], scale=0.125, causal="top_left" if case == "causal" else "none")
    assert relative_error(output, recorded["y"]) <= 1e-4
    assert relative_error(softmax_bwd(recorded["gy"], output, scale=0.125), recorded["gx"]) <= 1e-4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_masked_key_has_weight_zero_however_large_the_scores(dtype: torch.dtype) -> None:
    """B68: filling with -10000 lets a masked key with score 2e4 through."""
    scores = torch.tensor([[2e4, -2e4, -1.9e4], [-2e4, 1.9e4, -2e4]]).to(dtype)
    mask = torch.tensor([[True, False, False], [False, True, False]])
    result = softmax_fwd(scores, mask=mask)
    assert torch.equal(result[mask], torch.zeros(2).to(dtype))
    expected = torch.softmax(scores.double().masked_fill(mask, -INF), -1)
    assert roundings(result, expected, 4 * FP32_ROUNDING * expected) <= 1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_with_nothing_to_see_has_zero_output_and_zero_gradient(dtype: torch.dtype) -> None:
    """B68: softmax over nothing gave NaN."""
    scores, mask = draw(3, 4).to(dtype), torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    output = softmax_fwd(scores, mask=mask)
    assert torch.equal(output[1], torch.zeros(4).to(dtype))
    grad = draw(3, 4, seed=1).to(dtype)
    grad[1] = INF
    grad_input = softmax_bwd(grad, output)
    assert torch.equal(grad_input[1], torch.zeros(4).to(dtype))
    assert grad_input.isfinite().all()


def test_queries_beyond_the_last_key_see_nothing_when_aligned_to_the_bottom_right() -> None:
    """With fewer keys than queries the first queries lie before the first key."""
    output = softmax_fwd(draw(5, 3), causal="bottom_right")
    assert torch.equal((output != 0).sum(-1), torch.tensor([0, 0, 1, 2, 3]))


def test_a_window_does_not_discard_the_mask() -> None:
    """B70: key 1 is hidden by the mask, the window would show it."""
    mask = torch.tensor([False, True, False, False])
    output = softmax_fwd(torch.zeros(4, 4), mask=mask, causal="top_left", window=(2, 0))
    assert torch.equal(output[:, 1], torch.zeros(4))
    assert torch.equal(output[3], torch.tensor([0.0, 0.0, 0.5, 0.5]))


@pytest.mark.parametrize("window", [(-1, 2), (-1, -1), (-1, 0)], ids=str)
def test_a_causal_mask_bounds_the_window_on_the_right(window: tuple[int, int]) -> None:
    scores = draw(4, 6)
    for causal in ("top_left", "bottom_right"):
        assert torch.equal(softmax_fwd(scores, causal=causal, window=window), softmax_fwd(scores, causal=causal))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_visible_nan_or_infinity_makes_the_visible_part_of_its_row_nan(poison: float) -> None:
    scores, mask = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    mask[:, 3] = True
    scores[1, 0] = poison
    output = softmax_fwd(scores, mask=mask)
    assert output[1, :3].isnan().all()
    assert torch.equal(output[:, 3], torch.zeros(3))
    assert torch.equal(output[[0, 2], :3], torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_a_mask_hides_does_not_count(poison: float) -> None:
    scores, mask = draw(2, 4), torch.tensor([False, False, True, False])
    clean = softmax_fwd(scores, mask=mask)
    scores[:, 2] = poison
    assert torch.equal(softmax_fwd(scores, mask=mask), clean)
    grad = draw(2, 4, seed=1)
    clean_grad = softmax_bwd(grad, clean)
    grad[:, 2] = poison
    assert torch.equal(softmax_bwd(grad, clean), clean_grad)


@pytest.mark.parametrize("poison", [NAN, INF, 3.0])
def test_a_gradient_does_not_look_at_what_causal_and_window_hide(poison: float) -> None:
    flags: dict[str, Any] = {"causal": "bottom_right", "window": (2, -1)}
    output, grad = softmax_fwd(draw(4, 6), **flags), draw(4, 6, seed=1)
    hidden = output == 0
    expected = softmax_bwd(grad, output)
    found = softmax_bwd(grad.masked_fill(hidden, poison), output.masked_fill(hidden, poison), **flags)
    assert torch.equal(found, expected)


def test_a_score_of_minus_infinity_hides_as_a_mask_does() -> None:
    scores = torch.tensor([[0.0, -INF, 0.0], [-INF, -INF, -INF]])
    assert torch.equal(softmax_fwd(scores), torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_scores_give_empty_probabilities(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape[-1], dtype=torch.bool)
    output = softmax_fwd(torch.empty(shape), mask=mask, causal="bottom_right", out_dtype=torch.bfloat16)
    assert output.shape == shape
    assert output.dtype == torch.bfloat16
    assert softmax_bwd(torch.empty(shape), output).shape == shape


def test_the_caller_keeps_scores_mask_and_gradient_unchanged() -> None:
    tensors = [draw(3, 3), draw(3, 3, seed=1), draw(3, 3, seed=2) > 0]
    copies = [t.clone() for t in tensors]
    output = softmax_fwd(tensors[0], mask=tensors[2], causal="top_left")
    softmax_bwd(tensors[1], output)
    assert all(itertools.starmap(torch.equal, zip(tensors, copies, strict=True)))
