"""Capability answers: a code that is one, and a no that is no."""

from __future__ import annotations

import pytest

from te_hal.schema.errors import ArgumentError
from te_hal.schema.support import SUPPORTED, Code, Support


@pytest.mark.parametrize("code", Code, ids=str)
def test_a_code_may_be_given_by_its_value(code: Code) -> None:
    assert Support(code.value).code is code  # type: ignore[arg-type]
    assert bool(Support(code.value)) == (code is Code.YES)  # type: ignore[arg-type]


def test_a_no_by_value_equals_the_no_by_code() -> None:
    assert Support.no("dtype", "takes bf16 only") == Support.no(Code.DTYPE, "takes bf16 only")  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["unknown", None, 3, ["dtype"]], ids=repr)
def test_an_unknown_code_is_refused_with_the_known_ones(code: object) -> None:
    with pytest.raises(ArgumentError, match=r"accepted: Code\.NO_KERNEL, .*Code\.LOAD_FAILED"):
        Support.no(code, "reason")  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [Code.YES, "yes"], ids=repr)
def test_a_no_needs_a_reason(code: Code) -> None:
    with pytest.raises(ArgumentError, match="return SUPPORTED for a yes"):
        Support.no(code, "reason")
    assert SUPPORTED
