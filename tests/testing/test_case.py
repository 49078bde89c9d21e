"""Cases: ids that can be pasted back, every pair of values, the same ones in every process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS
from te_hal.testing import Case, cases
from te_hal.testing.axes import axes_of
from te_hal.testing.case import is_valid
from te_hal.testing.certificate import schema_hash
from te_hal.testing.covering import cover

LISTING = """
from te_hal.testing import cases
from te_hal.testing.certificate import schema_hash
ids = [case.id for op in ("amax", "bias_grad_quantize") for case in cases(op, quick=True)]
print((ids, schema_hash("quantize_current")))
"""


@pytest.mark.parametrize("op", SCHEMAS)
def test_an_id_names_its_case(op):
    for case in cases(op, quick=True):
        assert Case.of(case.id) == case
        assert Case.of(case.id).words == case.words


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_quick_tier_has_every_value_that_a_valid_call_has(op):
    tried = {(axis, word) for case in cases(op, quick=True) for axis, word in case.words.items()}
    missing = [(axis, word) for axis, words in axes_of(SCHEMAS[op]).items() for word in words]
    missing = [goal for goal in missing if goal not in tried and goal != ("run", "streams")]
    # A history has a row at least.
    assert [goal for goal in missing if goal != ("shape", "0x16")] == []


def test_the_full_tier_has_every_pair_of_values():
    axes = {axis: words for axis, words in axes_of(SCHEMAS["amax"]).items() if axis != "run"}
    found = [{axis: case.words[axis] for axis in axes} for case in cases("amax")]
    for one, other in itertools.combinations(axes, 2):
        pairs = {(words[one], words[other]) for words in found}
        missing = set(itertools.product(axes[one], axes[other])) - pairs
        for first, second in missing:
            rest = itertools.product(*(axes[axis] for axis in axes if axis not in (one, other)))
            names = [axis for axis in axes if axis not in (one, other)]
            tried = ({one: first, other: second, **dict(zip(names, words, strict=True))} for words in rest)
            assert not any(is_valid(SCHEMAS["amax"], {**words, "run": "twice"}) for words in tried), (first, second)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_covering_keeps_to_what_is_valid(pairs):
    axes = {"a": "123", "b": "123", "c": "12"}
    found = list(cover(axes, lambda words: words["a"] != words["b"], pairs=pairs))
    assert all(words["a"] != words["b"] for words in found)
    assert {words["a"] for words in found} == {"1", "2", "3"}
    if pairs:
        assert {(w["a"], w["b"]) for w in found} == {(a, b) for a in "123" for b in "123" if a != b}


def test_another_process_has_the_same_cases():
    listing = subprocess.run(
        [sys.executable, "-c", LISTING],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    mine = [case.id for op in ("amax", "bias_grad_quantize") for case in cases(op, quick=True)]
    assert listing.strip() == str((mine, schema_hash("quantize_current")))


@pytest.mark.parametrize("op", SCHEMAS)
def test_operands_have_the_same_bytes_in_every_call(op):
    case = cases(op, quick=True)[1]
    for one, other in zip(case.arguments().values(), case.arguments().values(), strict=True):
        if hasattr(one, "untyped_storage"):
            assert bytes(one.untyped_storage()) == bytes(other.untyped_storage())


def test_every_float_dtype_of_an_operand_is_tried():
    for op, schema in SCHEMAS.items():
        tried = {case.words.get(operand.name) for case in cases(op, quick=True) for operand in schema.operands}
        if any(set(operand.dtypes) >= set(FLOATS) for operand in schema.operands):
            assert {"fp32", "fp16", "bf16"} <= tried


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("relu", "an op: quantize"),
        ("amax:shape=2xa", "shape=, one of 24x40"),
        ("amax:colour=red", "an axis: shape, values"),
        ("gemm:layout=dgrad,bias=fp32", "a call that keeps the rules"),
        ("quantize:everyday,", "an axis"),
    ],
)
def test_what_is_no_case_is_refused_with_what_would_be(text, words):
    with pytest.raises(ArgumentError, match=words):
        Case.of(text)
