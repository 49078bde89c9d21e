"""Every op refuses every wrong argument, on its first call and after right ones, with four facts.

The cases come from the schemas: each takes a right call and breaks one thing.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from example_calls import ALL_CALLS, arguments, call_id, operand_value, shape_of, storage, tensor

import te_hal
from te_hal import ops
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, TeHalError
from te_hal.schema.op import Flag, FlagType, Operand, OpSchema


@dataclasses.dataclass(frozen=True)
class Case:
    """One broken argument of one call."""

    schema: OpSchema
    variant: object
    name: str
    what: str
    value: Any
    error: type[TeHalError] = ArgumentError

    def __str__(self) -> str:
        variant = "" if self.variant is None else f"-{self.variant}"
        return f"{self.schema.name}{variant}-{self.name}-{self.what}"


def some_calls() -> Iterator[tuple[OpSchema, Any]]:
    """Each op once per distinct set of shape rules."""
    seen = set()
    for schema, variant in ALL_CALLS:
        rules = (schema.name, *(shape_of(schema, operand, variant) for operand in schema.operands))
        if rules not in seen:
            seen.add(rules)
            yield schema, variant


def with_every_operand(schema: OpSchema, variant: object) -> dict[str, Any]:
    return arguments(schema, variant, every_operand=True)


class Wrapped(torch.Tensor):
    """As a user's quantized tensor: a Tensor around a storage."""

    quantized_storage = storage((2, 3))


def as_given(schema: OpSchema, variant: object, operand: Operand, value: object) -> object:
    """A wrong value as the caller would pass it: of an operand that takes several the second one."""
    return [operand_value(schema, operand, variant)[0], value] if operand.many else value


def wrong_types(schema: OpSchema, variant: object, operand: Operand) -> Iterator[Case]:
    shape = shape_of(schema, operand, variant)
    values = {
        "list": [1.0],
        "number": 1.0,
        "text": "x",
        "numpy": np.ones(shape, np.float32),
        "dtype": torch.float32,
        "quantized_tensor": torch.ones(shape).as_subclass(Wrapped),
    }
    if not operand.optional:
        values["none"] = None
    for what, value in values.items():
        yield Case(schema, variant, operand.name, what, value, ArgumentTypeError)
        if operand.many and what != "none":
            second = as_given(schema, variant, operand, value)
            yield Case(schema, variant, operand.name, f"{what}_second", second, ArgumentTypeError)


def wrong_dtypes(schema: OpSchema, variant: object, operand: Operand) -> Iterator[Case]:
    shape = shape_of(schema, operand, variant)
    for dtype in (torch.int64, torch.float64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
        if dtype not in operand.dtypes:
            value = as_given(schema, variant, operand, torch.zeros(shape, dtype=dtype))
            yield Case(schema, variant, operand.name, str(dtype).split(".")[1], value)
    if not operand.formats:
        value = as_given(schema, variant, operand, storage(shape))
        yield Case(schema, variant, operand.name, "storage", value)
    if operand.many:
        yield Case(schema, variant, operand.name, "nothing", [])
        yield Case(
            schema,
            variant,
            operand.name,
            "three",
            [*operand_value(schema, operand, variant), tensor(shape, torch.float32)],
        )


def wrong_shapes(schema: OpSchema, variant: object, operand: Operand) -> Iterator[Case]:
    rule = schema.shape_rule(operand.shape, variant)
    right = shape_of(schema, operand, variant)
    shapes: dict[str, tuple[int, ...]] = {}
    if rule == "1":
        shapes = {"two_elements": (2,), "no_element": (0,)}
    elif rule[0] == "*":
        shapes = {"transposed": right[::-1], "one_more_dimension": (1, *right), "scalar": ()}
    elif rule[0] == "<":
        shapes = {"longer": (*right[:-1], right[-1] + 1), "one_more_dimension": (2, *right)}
    else:
        tokens = rule.split()
        named = [symbol for symbol in tokens if symbol != "..."]
        others = " ".join(
            schema.shape_rule(o.shape, variant) for o in schema.operands if o.name != operand.name
        ).split()
        if named:
            shapes["scalar"] = ()
        if tokens[0] != "...":
            shapes["one_more_dimension"] = (2, *right)
        elif "..." in others:
            shapes["other_leading"] = (right[0] + 1, *right[1:])
        for index, symbol in enumerate(reversed(named), start=1):
            if symbol[0].isdigit() or symbol in others or f"2{symbol}" in others:
                changed = list(right)
                changed[-index] += 1
                shapes[f"other_{symbol}"] = tuple(changed)
    for what, shape in shapes.items():
        value = tensor(shape, operand.dtypes[0]) if operand.dtypes else storage(shape)
        yield Case(schema, variant, operand.name, what, as_given(schema, variant, operand, value))


WRONG_FLAGS: dict[FlagType, dict[str, object]] = {
    FlagType.BOOL: {"one": 1, "text": "False", "none": None, "tensor": torch.ones(())},
    FlagType.INT: {"float": 1.0, "bool": True, "text": "1", "none": None},
    FlagType.FLOAT: {"text": "1", "bool": True, "none": None, "tensor": torch.ones(1)},
    FlagType.FLOATS: {"number": 1.0, "text": "1", "none": None, "of_text": ["1", "1"], "of_bool": [True, 1.0]},
    FlagType.OPTIONAL_FLOAT: {"text": "1", "bool": True, "tensor": torch.ones(1)},
    FlagType.OPTIONAL_INT: {"float": 1.0, "bool": True, "text": "1", "tensor": torch.ones(1)},
    FlagType.CHOICE: {"unknown": "unknown", "number": 0, "none": None, "list": ["none"]},
    FlagType.DTYPE: {"wrong": torch.int32, "text": "float8_e4m3fn", "none": None, "python": float},
    FlagType.OPTIONAL_DTYPE: {"wrong": torch.int32, "fp8": torch.float8_e5m2, "text": "float32", "python": float},
    FlagType.WINDOW: {"one": 1, "three": (1, 1, 1), "below": (-2, 0), "list": [-1, -1], "float": (1.0, 0)},
}


def wrong_flags(schema: OpSchema, variant: object, flag: Flag) -> Iterator[Case]:
    for what, value in WRONG_FLAGS[flag.type].items():
        yield Case(schema, variant, flag.name, what, value)


def all_cases() -> Iterator[Case]:
    for schema, variant in some_calls():
        given = with_every_operand(schema, variant)
        for operand in schema.operands:
            if given[operand.name] is not None:
                yield from wrong_types(schema, variant, operand)
                yield from wrong_dtypes(schema, variant, operand)
                yield from wrong_shapes(schema, variant, operand)
        for flag in schema.flags:
            yield from wrong_flags(schema, variant, flag)


CASES = list(all_cases())


@pytest.fixture(autouse=True)
def _null_in_force() -> None:
    te_hal.set_backend("null")


def names_the_argument(case: Case, error: TeHalError) -> bool:
    """A wrong size may be noticed at the operand it disagrees with; then the message holds both shapes."""
    return f"{case.schema.name}" in error.where and case.name in f"{error.where} {error.got} {error.accepted}"


@pytest.mark.parametrize("memo", ["first_call", "after_a_right_call"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_argument_is_refused_by_name_with_four_facts(case: Case, memo: str) -> None:
    function = getattr(ops, case.schema.name)
    right = with_every_operand(case.schema, case.variant)
    if memo == "after_a_right_call":
        function(**right)
    with pytest.raises(case.error) as error:
        function(**{**right, case.name: case.value})
    found = error.value
    assert names_the_argument(case, found)
    for fact in (found.where, found.got, found.accepted, found.todo):
        assert fact
        assert fact in str(found)


def test_the_generated_cases_cover_every_argument_of_every_op() -> None:
    covered = {(case.schema.name, case.name) for case in CASES}
    assert covered == {(schema.name, name) for schema in SCHEMAS.values() for name, _, _ in schema.signature}
    assert len(CASES) > 500


@pytest.mark.parametrize("memo", ["first_call", "after_a_right_call"])
@pytest.mark.parametrize(("schema", "variant"), list(some_calls()), ids=call_id)
def test_operands_on_two_devices_are_refused_naming_both(schema: OpSchema, variant: object, memo: str) -> None:
    function = getattr(ops, schema.name)
    right = with_every_operand(schema, variant)
    if memo == "after_a_right_call":
        function(**right)
    operands = [o for o in schema.operands if right[o.name] is not None]
    for operand in operands if len(operands) > 1 else []:
        moved = operand_value(schema, operand, variant, device="meta")
        with pytest.raises(ArgumentError, match="on one device") as error:
            function(**{**right, operand.name: moved})
        assert f"{operand.name} on meta" in str(error.value)
        assert "on cpu" in str(error.value)


#: What a call in a mode of NVFP4 has to have besides, whatever else is wrong with it.
_BYSTANDERS = {"dtype": torch.uint8, "scale": None, "amax": None}
_NVFP4 = {"mode": "nvfp4", "columnwise": True, **_BYSTANDERS}
RULES = {
    "no_copy": ("quantize", None, {"rowwise": False, "columnwise": False}, "at least one of rowwise"),
    "no_scale": ("quantize", None, {"scale": None}, "per-tensor scaling needs `scale`"),
    "mtfp8_transposed": ("quantize", None, {"mode": "mtfp8_1x128", "columnwise": True}, "lies in rowwise order"),
    "nvfp4_in_e4m3": ("quantize", None, {"mode": "nvfp4"}, "E2M1 codes, two a byte"),
    "nvfp4_in_rowwise_order": (
        "quantize",
        None,
        {**_NVFP4, "columnwise_order": "same"},
        "a columnwise copy lies trans",
    ),
    "a_seed_beside_one_scale": ("quantize", None, {"rounding_seed": 1}, "goes with modes 'nvfp4' and"),
    "a_scale_for_blocks": ("quantize", None, {"mode": "mxfp8"}, "go with per-tensor scaling"),
    "a_floor_below_a_given_scale": ("quantize", None, {"amax_epsilon": 1e-9}, "go with modes 'block_1x128' and"),
    "a_given_scale_to_round": ("quantize", None, {"power_of_2": True}, "go with modes 'block_1x128' and"),
    "floor_negative": ("quantize", None, {"amax_epsilon": -1.0}, "amax_epsilon must be a number from 0"),
    "floor_infinite": ("quantize", None, {"amax_epsilon": float("inf")}, "to fp32's largest"),
    "out_of_another_format": (
        "quantize",
        None,
        {"out": storage((2, 3), torch.float8_e5m2)},
        "`out` must have the format",
    ),
    "out_without_columnwise": ("quantize", None, {"out": storage((2, 3)), "columnwise": True}, "`out` must have"),
    "bias_in_dgrad": ("gemm", "dgrad", {"bias": torch.ones(5)}, "a bias goes with layout 'fprop'"),
    "bias_in_wgrad": ("gemm", "wgrad", {"bias": torch.ones(5)}, "a bias goes with layout 'fprop'"),
    "accumulate_into_nothing": ("gemm", "fprop", {"accumulate": True}, "accumulate=True needs `out`"),
    "two_dtypes": (
        "gemm",
        "fprop",
        {"out": torch.ones(4, 5), "out_dtype": torch.float16},
        "`out` and `out_dtype` must name one dtype",
    ),
    "fp8_max_zero": ("compute_scale", None, {"fp8_max": 0.0}, "fp8_max must be positive"),
    "fp8_max_infinite": ("compute_scale", None, {"fp8_max": float("inf")}, "at most fp32's largest"),
    "fp8_max_beyond_fp32": ("compute_scale", None, {"fp8_max": 1e300}, "at most fp32's largest"),
    "epsilon_negative": ("compute_scale", None, {"epsilon": -1e-9}, "epsilon must be a number from 0"),
    "epsilon_infinite": ("compute_scale", None, {"epsilon": float("inf")}, "to fp32's largest"),
    "value_for_inf_zero": ("compute_scale", None, {"value_for_inf": 0}, "value_for_inf must be positive"),
    "value_for_inf_infinite": ("compute_scale", None, {"value_for_inf": float("inf")}, "at most fp32's largest"),
    "fp8_max_negative": ("update_delayed_scale", None, {"fp8_max": -448}, "fp8_max must be positive"),
    "fp8_max_infinite_for_update": ("update_delayed_scale", None, {"fp8_max": float("inf")}, "at most fp32's largest"),
    "margin_above": ("update_delayed_scale", None, {"margin": 101}, "margin must be from -100 to 100"),
    "margin_far_above": ("update_delayed_scale", None, {"margin": 10**6}, "margin must be from -100 to 100"),
    "margin_below": ("update_delayed_scale", None, {"margin": -101}, "margin must be from -100 to 100"),
    "no_history": ("update_delayed_scale", None, {"amax_history": torch.zeros(0, 2)}, "at least one row"),
    "fp8_maxima_zero": ("update_delayed_scales", None, {"fp8_maxima": [448.0, 0.0]}, "fp8_maxima must be positive"),
    "too_few_maxima": ("update_delayed_scales", None, {"fp8_maxima": [448.0]}, "one number per history"),
    "margin_of_several": ("update_delayed_scales", None, {"margin": 101}, "margin must be from -100 to 100"),
    "one_without_history": (
        "update_delayed_scales",
        None,
        {"amax_histories": [torch.zeros(2, 5), torch.zeros(0, 5)]},
        "at least one row each",
    ),
    "layernorm_epsilon": ("layernorm_fwd", None, {"epsilon": -1.0}, "epsilon must be a number from 0"),
    "layernorm_epsilon_infinite": ("layernorm_fwd", None, {"epsilon": float("inf")}, "to fp32's largest"),
    "rmsnorm_epsilon": ("rmsnorm_fwd", None, {"epsilon": -1.0}, "epsilon must be a number from 0"),
    "limit_of_swiglu": ("activation_fwd", "swiglu", {"limit": 7.0}, "belong to clamped_swiglu"),
    "alpha_of_gelu": ("activation_bwd", "gelu", {"alpha": 1.0}, "belong to clamped_swiglu"),
    "current_no_copy": ("quantize_current", None, {"rowwise": False}, "at least one of rowwise"),
    "current_amax_epsilon": ("quantize_current", None, {"amax_epsilon": -1.0}, "amax_epsilon must be"),
    "current_out": (
        "quantize_current",
        None,
        {"out": storage((2, 3), torch.float8_e5m2)},
        "`out` must have per-tensor",
    ),
    "fused_norm_epsilon": ("layernorm_quantize", None, {"epsilon": -1.0}, "epsilon must be a number from 0"),
    "fused_rms_epsilon": ("rmsnorm_quantize", None, {"epsilon": -1.0}, "epsilon must be a number from 0"),
    "fused_limit": ("activation_quantize", "gelu", {"limit": 7.0}, "belong to clamped_swiglu"),
    "fused_alpha": ("activation_bwd_quantize", "gelu", {"alpha": 7.0}, "belong to clamped_swiglu"),
}
for _op, _variant in {
    "layernorm_quantize": None,
    "rmsnorm_quantize": None,
    "activation_quantize": "gelu",
    "activation_bwd_quantize": "gelu",
    "bias_grad_quantize": None,
}.items():
    RULES |= {
        f"{_op}_no_copy": (_op, _variant, {"rowwise": False}, "at least one of rowwise"),
        f"{_op}_mtfp8": (_op, _variant, {"mode": "mtfp8_128x128", "columnwise": True}, "lies in rowwise order"),
        f"{_op}_nvfp4": (_op, _variant, {"mode": "nvfp4"}, "E2M1 codes, two a byte"),
        f"{_op}_nvfp4_order": (
            _op,
            _variant,
            {**_NVFP4, "columnwise_order": "same"},
            "a columnwise copy lies transposed",
        ),
        f"{_op}_seed": (_op, _variant, {"rounding_seed": 1}, "goes with modes 'nvfp4' and"),
        f"{_op}_amax_epsilon": (_op, _variant, {"amax_epsilon": float("inf")}, "amax_epsilon must be"),
        f"{_op}_scale_of_blocks": (_op, _variant, {"scale": torch.ones(1), "mode": "block_1x128"}, "`scale` goes with"),
        f"{_op}_amax_alone": (_op, _variant, {"amax": torch.ones(1)}, "`amax` records where"),
        f"{_op}_two_scales": (_op, _variant, {"scale": torch.ones(1), "power_of_2": True}, "shape the result's own"),
    }


@pytest.mark.parametrize("case", RULES)
def test_a_broken_rule_is_explained(case: str) -> None:
    op, variant, changed, sentence = RULES[case]
    right = arguments(SCHEMAS[op], variant)
    getattr(ops, op)(**right)
    with pytest.raises(ArgumentError) as error:
        getattr(ops, op)(**{**right, **changed})
    assert sentence in error.value.accepted
    assert error.value.where == op
    besides = _BYSTANDERS.keys() if "nvfp4" in case and len(changed) > len(_BYSTANDERS) else ()
    assert all(f"{name}=" in error.value.got for name in changed if name not in besides)


def test_a_broken_rule_shows_the_arguments_that_it_names_and_no_others() -> None:
    x = torch.ones(4, 4)
    with pytest.raises(ArgumentError) as error:
        ops.gemm(x, x, accumulate=True)
    assert error.value.got == "out=None, accumulate=True"


@pytest.mark.parametrize("margin", [-100, 100])
def test_the_largest_margins_are_taken(margin: int) -> None:
    ops.update_delayed_scale(torch.ones(2, 1), torch.ones(1), fp8_max=448.0, margin=margin)


def test_every_rule_of_every_schema_has_a_case() -> None:
    known = {(schema.name, rule.sentence) for schema in SCHEMAS.values() for rule in schema.rules}
    broken = {
        (op, sentence)
        for op, _, _, part in RULES.values()
        for name, sentence in known
        if name == op and part in sentence
    }
    twins = {("activation_fwd", s) for n, s in known if n == "activation_bwd"}
    assert known - broken <= twins


def test_a_shape_error_names_every_shape_and_rule() -> None:
    with pytest.raises(ArgumentError) as error:
        ops.gemm(torch.ones(4, 6), torch.ones(5, 7), bias=torch.ones(5), layout="fprop")
    assert str(error.value) == (
        "gemm(layout='fprop'): b: got a (4, 6), b (5, 7), bias (5,); accepted: a [M, K], b [N, K], bias [N]; "
        "reshape or pad the operand named first"
    )


@pytest.mark.parametrize("value", [2, 2.0, True, float("inf")], ids=repr)
def test_a_float_flag_takes_ints_and_infinities_but_no_bool(value: float) -> None:
    if isinstance(value, bool):
        with pytest.raises(ArgumentError, match="got True; accepted: a Python number"):
            ops.softmax_fwd(torch.ones(2, 2), scale=value)
    else:
        ops.softmax_fwd(torch.ones(2, 2), scale=value)


NO_NUMBERS = {
    "nan": ("compute_scale", {"fp8_max": float("nan")}, "fp8_max: got nan; accepted: a Python number"),
    "nan_that_no_rule_is_about": ("softmax_fwd", {"scale": float("nan")}, "scale: got nan"),
    "an_int_that_no_float_holds": ("softmax_fwd", {"scale": 10**400}, "accepted: a Python number"),
    "0_in_fp32": ("compute_scale", {"fp8_max": 1e-60}, r"fp8_max: got 1e-60; accepted: 0, or a number that is more"),
    "0_in_fp32_by_rounding": ("update_delayed_scale", {"fp8_max": 2.0**-150}, "more than 0 in fp32"),
    "0_in_fp32_below_0": ("compute_scale", {"epsilon": -1e-60}, "more than 0 in fp32"),
    "0_in_fp32_for_inf": ("compute_scale", {"value_for_inf": 1e-60}, "more than 0 in fp32"),
    "0_in_fp32_among_several": ("update_delayed_scales", {"fp8_maxima": [1.0, 1e-60]}, "fp8_maxima: got 1e-60"),
}


@pytest.mark.parametrize("case", NO_NUMBERS)
def test_a_number_that_kernels_cannot_take_as_what_it_is_is_refused(case: str) -> None:
    op, changed, words = NO_NUMBERS[case]
    right = arguments(SCHEMAS[op], None)
    with pytest.raises(ArgumentError, match=words):
        getattr(ops, op)(**{**right, **changed})


def test_right_calls_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schema, variant in ALL_CALLS:
            getattr(ops, schema.name)(**arguments(schema, variant))
