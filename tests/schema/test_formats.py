"""Element formats, TE's dtype codes, and the enums that also are their strings."""

import ml_dtypes
import numpy as np
import pytest
import torch

from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, DType, ElementFormat, ScalingMode, element_format

NUMPY = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_formats_maximum_is_its_largest_finite_code(fmt: ElementFormat) -> None:
    values = np.arange(256, dtype=np.uint8).view(NUMPY[fmt.name]).astype(np.float64)
    assert fmt.max == values[np.isfinite(values)].max()
    assert fmt.max == torch.finfo(fmt.dtype).max


@pytest.mark.parametrize(
    ("value", "fmt"),
    [
        (torch.float8_e4m3fn, E4M3),
        (torch.float8_e5m2, E5M2),
        (DType.kFloat8E4M3, E4M3),
        (DType.kFloat8E5M2, E5M2),
        (8, E5M2),
        (E5M2, E5M2),
    ],
    ids=repr,
)
def test_a_format_is_found_by_dtype_code_or_itself(value: object, fmt: ElementFormat) -> None:
    assert element_format(value) is fmt  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [torch.bfloat16, DType.kFloat32, DType.kFloat4E2M1, 99, "E4M3", None], ids=repr)
def test_what_names_no_fp8_format_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"quantizer: got dtype .*; accepted: torch.float8_e4m3fn"):
        element_format(value, "quantizer")  # type: ignore[arg-type]


@pytest.mark.parametrize("member", [*ScalingMode, *ColumnwiseOrder], ids=str)
def test_an_enum_member_equals_and_hashes_as_its_string(member: ScalingMode | ColumnwiseOrder) -> None:
    assert member == member.value
    assert {member: 1}[member.value] == 1  # type: ignore[index]
