"""The op functions are the schemas: same names, same signatures, and each argument arrives where it belongs."""

import inspect
from typing import Any

import pytest
import torch
from example_calls import ALL_CALLS, arguments, call_id

import te_hal
from te_hal import ops
from te_hal.dispatch import ANY_DEVICE, Backend, register_backend
from te_hal.dispatch.signature import signature_text
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import REQUIRED, OpSchema
from te_hal.schema.support import SUPPORTED


def test_there_is_one_function_per_schema_and_nothing_else() -> None:
    assert sorted(ops.__all__) == sorted(SCHEMAS)
    assert all(inspect.isfunction(getattr(ops, name)) for name in ops.__all__)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=call_id)
def test_a_function_has_the_signature_of_its_schema(schema: OpSchema) -> None:
    found = [
        (p.name, p.kind is p.KEYWORD_ONLY, REQUIRED if p.default is p.empty else p.default)
        for p in inspect.signature(getattr(ops, schema.name)).parameters.values()
    ]
    assert found == list(schema.signature)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=call_id)
def test_a_function_documents_every_argument_its_rules_and_its_errors(schema: OpSchema) -> None:
    text = inspect.getdoc(getattr(ops, schema.name)) or ""
    for name, _, _ in schema.signature:
        assert f"\n    {name}: " in text, f"{name} is not under Args"
    assert any(rule in text for rule in schema.contract.rules)
    assert "Raises:" in text
    assert ("Returns:" in text) == bool(schema.outputs)


def recording_backend(record: dict[str, Any]) -> Backend:
    """Kernels that keep the arguments they got, by name, and return the string "result"."""
    namespace: dict[str, Any] = {"record": record, "torch": torch}
    for schema in SCHEMAS.values():
        body = f"    record.clear(); record.update(locals())\n    return 'result of {schema.name}'\n"
        exec(f"def {signature_text(schema)}:\n{body}", namespace)  # noqa: S102 - made from a schema
    return Backend(
        name="recorder",
        kernels={name: namespace[name] for name in SCHEMAS},
        serves=frozenset({ANY_DEVICE}),
        supports=lambda _: SUPPORTED,
    )


@pytest.mark.parametrize("every_operand", [False, True], ids=["few_operands", "every_operand"])
@pytest.mark.parametrize(("schema", "variant"), ALL_CALLS, ids=call_id)
def test_every_argument_reaches_the_kernel_and_its_result_comes_back(
    schema: OpSchema, variant: object, every_operand: bool
) -> None:
    record: dict[str, Any] = {}
    register_backend(recording_backend(record))
    given = arguments(schema, variant, every_operand=every_operand)
    if every_operand and schema.name == "quantize":
        given["out"] = ops.quantize(given["input"], given["scale"], dtype=given["dtype"])
    with te_hal.use_backend("recorder"):
        result = getattr(ops, schema.name)(**given)
    assert record.keys() == given.keys()
    for name, value in given.items():
        assert record[name] is value, name
    assert result == (f"result of {schema.name}" if schema.outputs else None)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=call_id)
def test_positional_arguments_are_those_of_the_schema(schema: OpSchema) -> None:
    register_backend(recording_backend(record := {}))
    variant = next(variant for other, variant in ALL_CALLS if other is schema)
    given = arguments(schema, variant)
    positional = [name for name, keyword_only, _ in schema.signature if not keyword_only]
    rest = {name: value for name, value in given.items() if name not in positional}
    with te_hal.use_backend("recorder"):
        getattr(ops, schema.name)(*(given[name] for name in positional), **rest)
    assert all(record[name] is given[name] for name in given)
    with pytest.raises(TypeError, match="positional argument"):
        getattr(ops, schema.name)(*(given[name] for name in positional), 1, **rest)


FLAG_OF_ANOTHER_VALUE = {
    "gemm": {"accumulate": True, "out_dtype": torch.float32},
    "quantize": {
        "dtype": torch.float8_e5m2,
        "mode": "block_1x128",
        "rowwise": False,
        "columnwise": True,
        "columnwise_order": "same",
        "amax_epsilon": 0.5,
        "power_of_2": True,
    },
    "quantize in 4 bits": {"dtype": torch.uint8, "mode": "nvfp4", "rounding_seed": 7},
    "dequantize": {"out_dtype": torch.float16},
    "compute_scale": {"fp8_max": 57344.0, "epsilon": 1.0, "power_of_2": True, "value_for_inf": 2.0},
    "update_delayed_scale": {"fp8_max": 57344.0, "margin": 2, "amax_compute_algo": "most_recent"},
    "layernorm_fwd": {"epsilon": 0.5, "zero_centered_gamma": True, "out_dtype": torch.float16},
    "layernorm_bwd": {"zero_centered_gamma": True},
    "rmsnorm_fwd": {"epsilon": 0.5, "zero_centered_gamma": True, "out_dtype": torch.float16},
    "rmsnorm_bwd": {"zero_centered_gamma": True},
    "softmax_fwd": {"scale": 0.5, "causal": "bottom_right", "window": (1, 0), "out_dtype": torch.float16},
    "softmax_bwd": {"scale": 0.5, "causal": "bottom_right", "window": (1, 0)},
    "bias_grad": {"out_dtype": torch.float16},
    "bias_activation_fwd": {"activation": "silu", "out_dtype": torch.float16},
    "bias_activation_bwd": {"activation": "silu", "bias_grad": True, "out_dtype": torch.float16},
    "activation_fwd": {"limit": 1.0, "alpha": 2.0, "glu_linear_offset": 3.0, "out_dtype": torch.float16},
    "activation_bwd": {"limit": 1.0, "alpha": 2.0, "glu_linear_offset": 3.0, "out_dtype": torch.float16},
}


@pytest.mark.parametrize("call", FLAG_OF_ANOTHER_VALUE)
def test_every_flag_reaches_the_kernel_with_the_value_given(call: str) -> None:
    register_backend(recording_backend(record := {}))
    op, flags = call.split(maxsplit=1)[0], FLAG_OF_ANOTHER_VALUE[call]
    schema = SCHEMAS[op]
    variant = {"gemm": "fprop", "activation_fwd": "clamped_swiglu", "activation_bwd": "clamped_swiglu"}.get(op)
    # Blocks find their own scales.
    given = (
        arguments(schema, variant, every_operand=op == "gemm") | flags | ({"scale": None} if "mode" in flags else {})
    )
    with te_hal.use_backend("recorder"):
        getattr(ops, op)(**given)
    assert {name: record[name] for name in flags} == flags


@pytest.mark.parametrize("op", sorted({call.split()[0] for call in FLAG_OF_ANOTHER_VALUE}))
def test_no_flag_is_left_out_above(op: str) -> None:
    schema = SCHEMAS[op]
    tried = {name for call, flags in FLAG_OF_ANOTHER_VALUE.items() if call.split()[0] == op for name in flags}
    assert tried == {flag.name for flag in schema.flags} - {schema.variant}
