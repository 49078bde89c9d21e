"""Modules against what Transformer Engine computed on an H200 (tests/golden/README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import golden_values
import pytest
from golden_modules import CASES, OWN_BIASES, bound_of, compared, distance, run, share_of, state_agrees

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[tuple[str, str, str], dict[str, torch.Tensor]]:
    return request.param, run(*request.param)


FP8_CASES = pytest.mark.parametrize(
    "case", [names for names in CASES if names[2] != "none"], ids="-".join, indirect=True
)


def test_outputs_and_gradients_lie_within_the_recorded_bounds(case):
    (module_name, dtype, recipe_name), found = case
    keys = [key for key in compared(found) if "meta" not in key]
    assert len(keys) >= 7
    for key in keys:
        assert distance(found[key], found[f"ref/{key}"]) <= bound_of(module_name, key, dtype, recipe_name), key


def test_every_recorded_state_is_reproduced_exactly_where_its_input_is(case):
    (module_name, _, recipe_name), found = case
    keys = [key for key in compared(found) if "meta" in key]
    parts = 3 if module_name == "TransformerLayer" else 1
    assert len(keys) == (12 * parts if recipe_name.startswith("delayed") else 0)
    for key in keys:
        assert state_agrees(module_name, key, found[key], found[f"ref/{key}"]), key


@FP8_CASES
def test_fp8_results_stand_far_closer_to_the_reference_than_the_unquantized_ones(case):
    (module_name, dtype, _), found = case
    values = golden_values.load(f"modules_{'bf16' if dtype == 'bfloat16' else 'fp32'}")
    for key in compared(found):
        if "meta" in key or ("grad/" in key and key.rpartition("/")[2] in OWN_BIASES):
            continue
        unquantized = values[f"{module_name}/{dtype}/none/{key}"]
        quantization = distance(unquantized, found[f"ref/{key}"])
        assert quantization > 0.005
        assert distance(found[key], found[f"ref/{key}"]) <= quantization * share_of(module_name, key), key
