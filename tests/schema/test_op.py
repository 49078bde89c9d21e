"""The schemas hold together: nothing named that does not exist, nothing declared twice."""

import inspect

import pytest
import torch
from example_calls import call_id, variants

from te_hal.dispatch import registry
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.checks import entry_source
from te_hal.schema.op import REQUIRED, FlagType, OpSchema
from te_hal.schema.shapes import parse

CONTRACT_OPS = {
    *("quantize", "dequantize", "amax", "compute_scale", "update_delayed_scale", "gemm"),
    *("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "softmax_fwd", "softmax_bwd"),
}
ALL = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=call_id)


def test_the_contract_families_are_required_and_the_rest_is_optional() -> None:
    assert {name for name, schema in SCHEMAS.items() if not schema.optional} == CONTRACT_OPS


@ALL
def test_names_are_unique_and_keyword_operands_exist(schema: OpSchema) -> None:
    names = [name for name, _, _ in schema.signature]
    assert len(set(names)) == len(names) == len(schema.operands) + len(schema.flags)
    assert schema.keyword_operands <= {operand.name for operand in schema.operands}
    assert all(operand.optional for operand in schema.operands if operand.name in schema.keyword_operands)


@ALL
def test_positional_arguments_come_first_and_required_ones_before_optional_ones(schema: OpSchema) -> None:
    kinds = [keyword_only for _, keyword_only, _ in schema.signature]
    assert kinds == sorted(kinds)
    optional = [default is not REQUIRED for _, keyword_only, default in schema.signature if not keyword_only]
    assert optional == sorted(optional)


@pytest.mark.parametrize("op", sorted(CONTRACT_OPS))
def test_arguments_by_name_are_split_as_a_kernel_takes_them(op: str) -> None:
    kernel = inspect.signature(registry.tables().backends["cpu_reference"].kernels[op])
    given = {name: object() for name in kernel.parameters}
    positional, keywords = SCHEMAS[op].split(given)
    assert kernel.bind(*positional, **keywords).arguments == given
    assert SCHEMAS[op].split({}) == ([], {})


@ALL
def test_every_shape_rule_can_be_read_for_every_variant(schema: OpSchema) -> None:
    operands = {operand.name for operand in schema.operands}
    for variant in variants(schema):
        for item in (*schema.operands, *schema.outputs):
            rule = schema.shape_rule(item.shape, variant)
            if rule[0] in "*<":
                assert rule[1:] in operands
            elif rule != "1":
                parse(rule)


@ALL
def test_a_default_is_a_right_value_of_its_flag(schema: OpSchema) -> None:
    for flag in schema.flags:
        if flag.default is not REQUIRED and flag.type in {FlagType.CHOICE, FlagType.DTYPE}:
            assert flag.default in flag.choices
        assert bool(flag.choices) == (flag.type in {FlagType.CHOICE, FlagType.DTYPE, FlagType.OPTIONAL_DTYPE}), (
            flag.name
        )


@ALL
def test_what_cannot_be_checked_on_every_call_is_part_of_the_memos_key(schema: OpSchema) -> None:
    remembered = {FlagType.CHOICE, FlagType.DTYPE, FlagType.OPTIONAL_DTYPE}
    assert all(flag.keyed for flag in schema.flags if flag.type in remembered)


@ALL
def test_a_contract_is_exact_or_has_a_bound_for_every_float_and_gives_its_reason(schema: OpSchema) -> None:
    contract = schema.contract
    floats = {torch.float32, torch.float16, torch.bfloat16}
    assert contract.exact != bool(contract.bound)
    assert contract.exact or set(contract.bound) == floats
    assert contract.reason
    assert contract.rules


@ALL
def test_written_operands_and_documentation_are_stated(schema: OpSchema) -> None:
    assert schema.summary.endswith(".")
    assert all(item.doc for item in (*schema.operands, *schema.flags, *schema.outputs))
    assert all(operand.written for operand in schema.operands if operand.name in {"out", "amax_history"})


@ALL
def test_the_generated_entry_is_straight_line_python(schema: OpSchema) -> None:
    source = entry_source(schema)
    compile(source, schema.name, "exec")
    assert not any(word in source for word in ("for ", "while ", "lambda", "import"))
