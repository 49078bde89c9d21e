"""Formats: the values and codes that Transformer Engine's enum has."""

from __future__ import annotations

import copy
import pickle

import ml_dtypes
import pytest
import torch

from te_hal.recipe import Format
from te_hal.schema.errors import ArgumentError

E4M3_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
E5M2_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max)


@pytest.mark.parametrize(
    ("name", "max_fwd", "max_bwd"),
    [("E2M1", 6.0, 6.0), ("E4M3", E4M3_MAX, E4M3_MAX), ("E5M2", E5M2_MAX, E5M2_MAX), ("HYBRID", E4M3_MAX, E5M2_MAX)],
)
def test_the_value_is_the_largest_magnitude_forward_and_backward(name, max_fwd, max_bwd):
    value = Format[name].value
    assert tuple(value) == (max_fwd, max_bwd)
    assert (value.max_fwd, value.max_bwd) == (max_fwd, max_bwd)


def test_there_are_four_members_and_no_aliases():
    assert [member.name for member in Format] == ["E2M1", "E4M3", "E5M2", "HYBRID"]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("E4M3", torch.float8_e4m3fn, torch.float8_e4m3fn),
        ("E5M2", torch.float8_e5m2, torch.float8_e5m2),
        ("HYBRID", torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_hybrid_is_e4m3_forward_and_e5m2_backward(name, forward, backward):
    assert Format[name].element_format(forward=True).dtype is forward
    assert Format[name].element_format(forward=False).dtype is backward


def test_the_four_bit_format_has_no_eight_bit_code():
    with pytest.raises(ArgumentError, match=r"Format\.E2M1.*8 bits"):
        Format.E2M1.element_format(forward=True)


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda member: pickle.loads(pickle.dumps(member))])
def test_a_copied_member_is_the_member(remake):
    assert remake(Format.HYBRID) is Format.HYBRID
