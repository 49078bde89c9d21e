"""What an error about an operand's dtype or format tells the caller to do: something that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from example_calls import storage, tensor

import te_hal
from te_hal import ops
from te_hal.schema.errors import ArgumentError

E4M3 = torch.float8_e4m3fn
ANY_FLOAT = "torch.float32 or torch.float16 or torch.bfloat16"
X = torch.ones(4, 4)
ONE = torch.ones(1)

ADVICE: dict[str, tuple[str, dict[str, Any], str]] = {
    "input_of_quantize": ("quantize", {"input": X.double(), "scale": ONE, "dtype": E4M3}, f"cast it to {ANY_FLOAT}"),
    "scale_of_quantize": (
        "quantize",
        {"input": X, "scale": ONE.double(), "dtype": E4M3},
        "cast it to torch.float32",
    ),
    "quantized_scale": (
        "quantize",
        {"input": X, "scale": storage((1,)), "dtype": E4M3},
        "pass a plain tensor, torch.float32",
    ),
    "quantized_input": ("amax", {"input": storage((4, 4))}, "dequantize it with te_hal.ops.dequantize"),
    "plain_out_of_quantize": (
        "quantize",
        {"input": X, "scale": ONE, "out": X, "dtype": E4M3},
        "pass a storage that te_hal.ops.quantize returned, or leave it out",
    ),
    "plain_input_of_dequantize": (
        "dequantize",
        {"input": X},
        "it is plain already: use it as it is, or quantize it first with te_hal.ops.quantize",
    ),
    "integer_bias": ("gemm", {"a": X, "b": X, "bias": torch.ones(4, dtype=torch.int32)}, f"cast it to {ANY_FLOAT}"),
    "double_operand": (
        "gemm",
        {"a": X.double(), "b": X},
        f"cast it to {ANY_FLOAT}, which te_hal.ops.quantize takes too",
    ),
    "bare_fp8_operand": (
        "gemm",
        {"a": X.to(E4M3), "b": X},
        "wrap its bytes and their scale_inv in a QuantizedStorage",
    ),
    "double_out": ("gemm", {"a": X, "b": X, "out": X.double()}, f"allocate it as {ANY_FLOAT}"),
    "quantized_out": ("gemm", {"a": X, "b": X, "out": storage((4, 4))}, f"pass a plain tensor, {ANY_FLOAT}"),
    "float_mask": (
        "softmax_fwd",
        {"input": X, "mask": X},
        "convert it with .bool(): True hides a key; broadcasts to input",
    ),
    "bf16_mean": (
        "layernorm_bwd",
        {
            "grad_output": X,
            "input": X,
            "mean": torch.ones(4, dtype=torch.bfloat16),
            "rstd": torch.ones(4),
            "weight": torch.ones(4),
        },
        "cast it to torch.float32",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_the_advice_fits_the_operand(case: str) -> None:
    op, arguments, todo = ADVICE[case]
    with te_hal.use_backend("null"), pytest.raises(ArgumentError) as error:
        getattr(ops, op)(**arguments)
    assert error.value.todo == todo


SPARSE = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("memo", ["first_call", "after_a_right_call"])
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_operand_is_refused_by_name(layout: str, memo: str) -> None:
    x, sparse = tensor((4, 4), torch.float32), SPARSE[layout](tensor((4, 4), torch.float32))
    calls = {
        "quantize: input": lambda value: ops.quantize(value, ONE, dtype=E4M3),
        "gemm: b": lambda value: ops.gemm(x, value),
        "gemm: out": lambda value: ops.gemm(x, x, out=value),
    }
    with te_hal.use_backend("null"):
        for where, call in calls.items():
            if memo == "after_a_right_call":
                call(x.clone())
            with pytest.raises(
                ArgumentError, match=r"got a tensor of layout torch.sparse_.*; pass its .to_dense"
            ) as error:
                call(sparse)
            assert error.value.where == where
