"""Refusals that are declared: what passes, and what does not."""

from __future__ import annotations

import pytest
import torch

from te_hal.schema.refusals import Refusal, refuse

DECLARED = {"flag": Refusal(False, "why not"), "size": Refusal(1, "why one"), "group": Refusal(None, "why none")}


@pytest.mark.parametrize("given", [{}, {"flag": False}, {"size": 1}, {"group": None}, {"other": 5}], ids=str)
def test_the_accepted_value_and_arguments_that_are_not_declared_pass(given):
    refuse("Layer", given, DECLARED)


@pytest.mark.parametrize(
    ("name", "value"),
    [("flag", True), ("flag", 0), ("size", 2), ("size", True), ("group", False), ("group", torch.ones(2))],
    ids=str,
)
def test_any_other_value_is_refused_by_name_with_the_reason(name, value):
    with pytest.raises(NotImplementedError, match=f"Layer: {name}: .*leave it out: {DECLARED[name].reason}"):
        refuse("Layer", {name: value}, DECLARED)
