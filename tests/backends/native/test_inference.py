"""Generation with a cache on the native backends, with and without FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from generation import CHANNELS, HIDDEN, Generation, Stack, cache, whole

import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from native_backends import NativeBackend

SCHEDULE = [{"a": 8}, {"a": 1, "b": 6}, {"a": 1, "b": 1, "c": 9}, {"c": 1, "b": 1}]
#: Largest distance from the whole sequences without FP8, as a share: roundings of fp32, and of E4M3.
RECIPES = {
    "none": (None, 1e-4),
    "current": (recipe.Float8CurrentScaling(), 0.1),
    "delayed": (recipe.DelayedScaling(), 0.1),
}


@pytest.mark.parametrize("layout", [{}, {"is_paged": True, "page_size": 4}], ids=["rows", "pages"])
@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@pytest.mark.parametrize("name", RECIPES)
def test_sequences_that_join_and_leave_give_what_whole_ones_give(native: NativeBackend, name, qkv_format, layout):
    chosen, bound = RECIPES[name]
    stack = Stack(qkv_format, kv_channels=CHANNELS)
    tokens = {name: torch.randn(12, HIDDEN) for name in "abc"}
    expected = {name: whole(stack, each) for name, each in tokens.items()}
    for layer in stack.layers:
        layer.to(native.put(torch.zeros(1)).device)
    generation = Generation(
        stack, cache(qkv_format=qkv_format, **layout), {name: native.put(each) for name, each in tokens.items()}
    )
    with native.use(), torch.no_grad(), te.autocast(enabled=chosen is not None, recipe=chosen):
        for step in SCHEDULE:
            generation.step(step)
    for sequence, each in expected.items():
        found = generation.output(sequence).cpu()
        assert (found - each[: len(found)]).norm() <= bound * each[: len(found)].norm()
