"""Shape rules: what they mean, and which texts are no rules."""

import pytest
import torch
from example_calls import ALL_CALLS, arguments, call_id

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import OpSchema
from te_hal.schema.shapes import Dims, broadcasts, output_dtype, output_shape, parse

PARSED = {
    "M K": Dims(False, ((1, "M"), (1, "K"))),
    "... H": Dims(True, ((1, "H"),)),
    "... 2F": Dims(True, ((2, "F"),)),
    "...": Dims(True, ()),
    "... Sq Sk": Dims(True, ((1, "Sq"), (1, "Sk"))),
}


@pytest.mark.parametrize("rule", PARSED)
def test_a_rule_is_a_row_of_factors_and_symbols(rule: str) -> None:
    assert parse(rule) == PARSED[rule]


@pytest.mark.parametrize("rule", ["m", "M ...", "2", "M-1", "M*2", "*", "H ... H"])
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        parse(rule)


BROADCASTS = [
    *[((), (2, 3)), ((3,), (2, 3)), ((1,), (2, 3)), ((2, 1), (2, 3)), ((2, 3), (2, 3)), ((1, 1), (2, 3))],
    *[((4,), (2, 3)), ((2, 2), (2, 3)), ((1, 2, 3), (2, 3)), ((3, 1), (2, 3)), ((0,), (2, 3)), ((3,), (0, 3))],
]


@pytest.mark.parametrize(("shape", "target"), BROADCASTS, ids=str)
def test_broadcasting_is_torchs_without_changing_the_target(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    try:
        torch.empty(shape).expand(target)
        right = True
    except RuntimeError:
        right = False
    assert broadcasts(shape, target) is right


@pytest.mark.parametrize(("schema", "variant"), ALL_CALLS, ids=call_id)
def test_every_result_has_a_shape_and_a_dtype_for_a_right_call(schema: OpSchema, variant: object) -> None:
    given = arguments(schema, variant)
    for output in schema.outputs:
        shape = output_shape(schema, output.shape, given)
        assert all(isinstance(size, int) and size > 0 for size in shape)
        assert isinstance(output_dtype(output.dtype, given), torch.dtype)


def test_a_result_without_a_dtype_says_what_it_follows() -> None:
    with pytest.raises(ValueError, match="follows 'out_dtype'"):
        output_dtype("out_dtype", {"out_dtype": None})


def test_zero_sizes_go_through() -> None:
    given = {"a": torch.ones(0, 3), "b": torch.ones(2, 3), "bias": None, "out": None, "layout": "fprop"}
    assert output_shape(SCHEMAS["gemm"], SCHEMAS["gemm"].outputs[0].shape, given) == (0, 2)
