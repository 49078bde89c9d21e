"""Modules against what Transformer Engine computed on an H200 (tests/golden/README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import golden_values
import pytest
from golden_modules import CASES, bound_of, compared, distance, run, state_bounds

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[tuple[str, str, str], dict[str, torch.Tensor]]:
    return request.param, run(*request.param)


FP8_CASES = pytest.mark.parametrize(
    "case", [names for names in CASES if names[2] != "none"], ids="-".join, indirect=True
)


def test_outputs_and_gradients_lie_within_the_recorded_bounds(case):
    (_, dtype, recipe_name), found = case
    keys = [key for key in compared(found) if "meta" not in key]
    assert len(keys) >= 7
    for key in keys:
        assert distance(found[key], found[f"ref/{key}"]) <= bound_of(key, dtype, recipe_name), key


def test_every_recorded_state_is_reproduced_exactly_where_its_input_is(case):
    (module_name, _, recipe_name), found = case
    keys = [key for key in compared(found) if "meta" in key]
    assert len(keys) == (12 if recipe_name.startswith("delayed") else 0)
    for key in keys:
        value, reference = found[key], found[f"ref/{key}"]
        bounds = state_bounds(module_name, key)
        for slot in range(value.shape[-1]):
            difference = (value[..., slot] - reference[..., slot]).abs()
            assert (difference <= bounds.get(slot, 0.0) * reference[..., slot]).all(), (key, slot)


@FP8_CASES
def test_fp8_results_stand_far_closer_to_the_reference_than_the_unquantized_ones(case):
    (module_name, dtype, _), found = case
    values = golden_values.load(f"modules_{'bf16' if dtype == 'bfloat16' else 'fp32'}")
    for key in [k for k in compared(found) if "meta" not in k and not k.endswith("grad/bias")]:
        unquantized = values[f"{module_name}/{dtype}/none/{key}"]
        quantization = distance(unquantized, found[f"ref/{key}"])
        assert quantization > 0.01
        assert distance(found[key], found[f"ref/{key}"]) <= quantization / 5, key
