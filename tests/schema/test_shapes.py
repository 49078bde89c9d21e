"""Shape rules: what they mean, and which texts are no rules."""

import pytest
import torch
from example_calls import ALL_CALLS, arguments, call_id

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import OpSchema
from te_hal.schema.shapes import Dims, broadcasts, dtype_source, parse, shape_source

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


def value_of(source: str, arguments: dict[str, object]) -> object:
    return eval(source, None, arguments)  # noqa: S307 - text made by te_hal itself


@pytest.mark.parametrize(("schema", "variant"), ALL_CALLS, ids=call_id)
def test_every_result_has_a_shape_and_a_dtype_for_a_right_call(schema: OpSchema, variant: object) -> None:
    given = arguments(schema, variant)
    for output in schema.outputs:
        shape = value_of(shape_source(schema, output.shape, variant), given)
        assert type(shape) is tuple
        assert all(isinstance(size, int) and size > 0 for size in shape)
        if isinstance(output.dtype, str):
            assert isinstance(value_of(dtype_source(schema, output.dtype), given), torch.dtype)


# Op, variant, operands -> the shape of its first result.
SHAPES: dict[str, tuple[str, object, dict[str, object], tuple[int, ...]]] = {
    "zero_sizes": ("gemm", "fprop", {"a": torch.ones(0, 3), "b": torch.ones(2, 3)}, (0, 2)),
    "wgrad": ("gemm", "wgrad", {"a": torch.ones(5, 2), "b": torch.ones(5, 3)}, (2, 3)),
    "half_of_the_last": ("activation_fwd", "swiglu", {"input": torch.ones(4, 2, 6)}, (4, 2, 3)),
    "one_element": ("amax", None, {"input": torch.ones(4, 2)}, (1,)),
    "of_an_operand": ("compute_scale", None, {"amax": torch.ones(())}, ()),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_results_shape_follows_its_rule(case: str) -> None:
    op, variant, given, expected = SHAPES[case]
    schema = SCHEMAS[op]
    assert value_of(shape_source(schema, schema.outputs[0].shape, variant), given) == expected


def test_a_results_dtype_is_the_first_that_is_given() -> None:
    source = dtype_source(SCHEMAS["gemm"], "out_dtype|out|a")
    half, double, single = torch.float16, torch.ones(1, dtype=torch.float64), torch.ones(1)
    assert value_of(source, {"out_dtype": half, "out": double, "a": single}) == torch.float16
    assert value_of(source, {"out_dtype": None, "out": double, "a": single}) == torch.float64
    assert value_of(source, {"out_dtype": None, "out": None, "a": single}) == torch.float32
