"""The null backend: right shapes, dtypes, devices and copies for every op, `out` itself where given."""

from typing import Any

import pytest
import torch
from example_calls import ALL_CALLS, LEADING, SIZES, arguments, call_id

import te_hal
from te_hal import ops
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.op import OpSchema
from te_hal.schema.storage import QuantizedStorage, StorageKind

H, ROWS = SIZES["H"], LEADING
F = SIZES["F"]
SCORES = (*LEADING, SIZES["Sq"], SIZES["Sk"])
FP32 = torch.float32

# op and variant -> (shape, dtype) of each result for the plainest call, whose operands are all fp32.
RESULTS: dict[tuple[str, object], list[tuple[tuple[int, ...], torch.dtype]]] = {
    ("dequantize", None): [(LEADING, FP32)],
    ("amax", None): [((1,), FP32)],
    ("compute_scale", None): [(LEADING, FP32)],
    ("update_delayed_scale", None): [],
    ("gemm", "fprop"): [((SIZES["M"], SIZES["N"]), FP32)],
    ("gemm", "dgrad"): [((SIZES["M"], SIZES["K"]), FP32)],
    ("gemm", "wgrad"): [((SIZES["N"], SIZES["K"]), FP32)],
    ("bias_grad", None): [((SIZES["N"],), FP32)],
    ("layernorm_fwd", None): [((*ROWS, H), FP32), (ROWS, FP32), (ROWS, FP32)],
    ("layernorm_bwd", None): [((*ROWS, H), FP32), ((H,), FP32), ((H,), FP32)],
    ("rmsnorm_fwd", None): [((*ROWS, H), FP32), (ROWS, FP32)],
    ("rmsnorm_bwd", None): [((*ROWS, H), FP32), ((H,), FP32)],
    ("softmax_fwd", None): [(SCORES, FP32)],
    ("softmax_bwd", None): [(SCORES, FP32)],
    ("bias_activation_fwd", None): [((*ROWS, F), FP32)],
    ("bias_activation_bwd", None): [((*ROWS, F), FP32)],
    ("bias_residual", None): [((*ROWS, F), FP32)],
    ("activation_fwd", "gelu"): [((*ROWS, F), FP32)],
    ("activation_fwd", "swiglu"): [((*ROWS, F), FP32)],
    ("activation_bwd", "gelu"): [((*ROWS, F), FP32)],
    ("activation_bwd", "swiglu"): [((*ROWS, 2 * F), FP32)],
}


@pytest.fixture(autouse=True)
def _null_in_force() -> None:
    te_hal.set_backend("null")


def results(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "variant"), RESULTS, ids=str)
def test_results_have_the_shape_dtype_and_device_of_the_op(op: str, variant: object, device: str) -> None:
    given = arguments(SCHEMAS[op], variant, device=device)
    found = [result for result in results(getattr(ops, op)(**given)) if result is not None]  # as was asked for
    assert [(tuple(t.shape), t.dtype) for t in found] == RESULTS[op, variant]
    assert {t.device.type for t in found} <= {device}


@pytest.mark.parametrize(("schema", "variant"), ALL_CALLS, ids=call_id)
def test_the_null_backend_runs_every_op_of_the_catalogue(schema: OpSchema, variant: object) -> None:
    found = results(getattr(ops, schema.name)(**arguments(schema, variant)))
    assert len(found) == len(schema.outputs)


OUT_DTYPE_OPS = [(schema, v) for schema, v in ALL_CALLS if any(f.name == "out_dtype" for f in schema.flags)]


@pytest.mark.parametrize(("schema", "variant"), OUT_DTYPE_OPS, ids=call_id)
def test_out_dtype_decides_the_first_result(schema: OpSchema, variant: object) -> None:
    given = arguments(schema, variant) | {"out_dtype": torch.bfloat16}
    assert results(getattr(ops, schema.name)(**given))[0].dtype is torch.bfloat16


def test_gradients_follow_the_dtype_of_what_they_are_gradients_of() -> None:
    given = arguments(SCHEMAS["layernorm_bwd"])
    given["grad_output"] = given["grad_output"].bfloat16()
    given["input"] = given["input"].half()
    assert [t.dtype for t in ops.layernorm_bwd(**given)] == [torch.float16, FP32, FP32]


@pytest.mark.parametrize("op", [name for name, s in SCHEMAS.items() if any(o.name == "out" for o in s.operands)])
def test_out_is_returned_untouched(op: str) -> None:
    schema = SCHEMAS[op]
    given = arguments(schema, "fprop" if op == "gemm" else None, every_operand=True)
    before = given["out"].clone() if isinstance(given["out"], torch.Tensor) else given["out"].rowwise_data.clone()
    assert getattr(ops, op)(**given) is given["out"]
    after = given["out"] if isinstance(given["out"], torch.Tensor) else given["out"].rowwise_data
    assert torch.equal(before, after)


COPIES = {
    "rowwise": ({}, (2, 3, 5), None),
    "columnwise": ({"rowwise": False, "columnwise": True}, None, (5, 2, 3)),
    "both": ({"columnwise": True}, (2, 3, 5), (5, 2, 3)),
    "both_in_the_same_order": ({"columnwise": True, "columnwise_order": "same"}, (2, 3, 5), (2, 3, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("case", COPIES)
def test_quantize_makes_the_copies_that_are_asked_for(case: str, dtype: torch.dtype) -> None:
    flags, rowwise, columnwise = COPIES[case]
    found = ops.quantize(torch.ones(2, 3, 5).bfloat16(), torch.ones(1), dtype=dtype, **flags)  # type: ignore[arg-type]
    assert isinstance(found, QuantizedStorage)
    assert (found.shape, found.dtype, found.format.dtype) == ((2, 3, 5), torch.bfloat16, dtype)
    for data, factor, shape in (
        (found.rowwise_data, found.rowwise_scale_inv, rowwise),
        (found.columnwise_data, found.columnwise_scale_inv, columnwise),
    ):
        if shape is None:
            assert data is None
            assert factor is None
        else:
            assert (tuple(data.shape), data.dtype) == (shape, torch.uint8)
            assert (tuple(factor.shape), factor.dtype) == ((1,), FP32)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (4, 0)], ids=str)
def test_scalars_and_empty_tensors_are_fine(shape: tuple[int, ...]) -> None:
    found = ops.quantize(torch.ones(shape), torch.ones(1), dtype=torch.float8_e4m3fn, columnwise=True)
    assert found.shape == shape
    assert tuple(ops.dequantize(found).shape) == shape


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_16x16", "nvfp4_hadamard"])
def test_nvfp4_has_two_codes_a_byte(mode: str) -> None:
    found = ops.quantize(torch.ones(16, 3, 32), dtype=torch.uint8, mode=mode, columnwise=True)  # type: ignore[arg-type]
    assert (found.rowwise_data.shape, found.columnwise_data.shape) == ((16, 3, 16), (32, 24))
    assert ops.dequantize(found).shape == (16, 3, 32)


@pytest.mark.parametrize("mode", ["block_1x128", "block_128x128", "mxfp8"])
def test_blocks_bring_scales_of_their_own(mode: str) -> None:
    found = ops.quantize(torch.ones(3, 5, 200), dtype=torch.float8_e4m3fn, mode=mode, columnwise=True)  # type: ignore[arg-type]
    row, column = found.rowwise_scale_inv, found.columnwise_scale_inv
    assert row is not None
    assert column is not None
    assert (row.dtype, column.dtype) == ((torch.uint8,) * 2 if mode == "mxfp8" else (FP32,) * 2)
    assert row.data_ptr() != column.data_ptr()


def test_a_scaling_mode_given_as_a_string_leaves_no_string_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageKind, "_known", {})
    one = torch.ones(1)
    with te_hal.use_backend("null"):
        ops.quantize(one, one, dtype=torch.float8_e5m2, mode="tensor")  # type: ignore[arg-type]
        later = ops.quantize(one, one, dtype=torch.float8_e5m2)
    assert repr(later.kind) == "E5M2/tensor/rowwise"
