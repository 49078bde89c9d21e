"""What belongs to an operand that is left out is left out too; numbers that fp32 cannot hold are refused."""

import pytest
import torch

X = torch.ones(16, 16)
#: entry: its arguments, in order, as they are accepted.
ACCEPTED = {
    "gemm": {
        "layout": 0, "m": 16, "n": 16, "k": 16, "a": X, "a_dtype": 1, "a_copy": 0, "a_mode": 0, "a_scale_inv": None,
        "a_row_stride": 0, "a_col_stride": 0, "b": X, "b_dtype": 1, "b_copy": 0, "b_mode": 0, "b_scale_inv": None,
        "b_row_stride": 0, "b_col_stride": 0, "bias": None, "bias_dtype": 0, "out": torch.zeros(16, 16), "out_dtype": 1,
        "flags": 0, "workspace": None, "workspace_size": 0, "stream": 0,
    },
    "softmax_fwd": {
        "input": X, "input_dtype": 1, "outer": 1, "inner": 1, "queries": 16, "keys": 16, "scale": 1.0, "mask": None,
        "outer_stride": 0, "inner_stride": 0, "query_stride": 0, "key_stride": 0, "causal": 0, "window_left": -1,
        "window_right": -1, "output": torch.zeros(16, 16), "output_dtype": 1, "stream": 0,
    },
    "softmax_bwd": {
        "grad_output": X, "grad_dtype": 1, "output": X, "output_dtype": 1, "batches": 1, "queries": 16, "keys": 16,
        "scale": 1.0, "causal": 0, "window_left": -1, "window_right": -1, "grad_input": torch.zeros(16, 16),
        "stream": 0,
    },
    "norm_fwd": {
        "norm": 2, "input": X, "input_dtype": 1, "rows": 16, "cols": 16, "weight": X, "weight_dtype": 1, "bias": None,
        "bias_dtype": 0, "epsilon": 1e-5, "flags": 0, "output": torch.zeros(16, 16), "output_dtype": 1, "mean": None,
        "rstd": torch.zeros(16), "stream": 0,
    },
    "bias_grad_quantize": {
        "grad_output": X, "grad_dtype": 1, "rows": 16, "cols": 16, "grad_bias": torch.zeros(16), "grad_bias_dtype": 1,
        "mode": 2, "scale": None, "amax": None, "scale_epsilon": 0.0, "flags": 0,
        "rowwise_data": torch.zeros(256, dtype=torch.uint8), "columnwise_data": None, "columnwise_order": 0,
        "rowwise_scale_inv": torch.zeros(1), "columnwise_scale_inv": None, "output_dtype": 4,
        "workspace": torch.empty(4096), "workspace_size": 16384, "stream": 0,
    },
}  # fmt: skip
CODES = torch.zeros(256, dtype=torch.uint8)
PER_TENSOR = {"b": CODES, "b_dtype": 4, "b_mode": 1, "b_scale_inv": torch.ones(1)}
#: entry, what is changed, and what the sentence names.
REFUSED = {
    "strides_of_a_plain_operand": ("gemm", {"a_row_stride": 1}, "a plain operand has no scales"),
    "strides_of_the_other": ("gemm", {"b_col_stride": -3}, "a plain operand has no scales"),
    "strides_of_one_scale": ("gemm", {**PER_TENSOR, "b_row_stride": 1}, "one scale has no strides"),
    "dtype_of_no_bias": ("gemm", {"bias_dtype": 1}, "bias is null"),
    "strides_of_no_mask": ("softmax_fwd", {"key_stride": 1}, "mask is null"),
    "scale_that_is_none": ("softmax_fwd", {"scale": float("nan")}, "scale is NaN"),
    "scale_that_is_none_backward": ("softmax_bwd", {"scale": float("nan")}, "scale is NaN"),
    "epsilon_beyond_fp32": ("norm_fwd", {"epsilon": 1e39}, "epsilon is 1e+39"),
    "fused_epsilon_beyond_fp32": ("bias_grad_quantize", {"scale_epsilon": 1e39}, "epsilon is 1e+39"),
}


@pytest.mark.parametrize("entry", ACCEPTED)
def test_what_is_left_out_as_a_whole_is_accepted(host_library, entry):
    assert host_library.call(entry, *ACCEPTED[entry].values()) == 0, host_library.last_error()


def test_one_scale_without_strides_is_accepted(host_library):
    arguments = ACCEPTED["gemm"] | PER_TENSOR

    assert host_library.call("gemm", *arguments.values()) == 0, host_library.last_error()


@pytest.mark.parametrize("case", REFUSED)
def test_what_belongs_to_nothing_or_fits_no_fp32_is_refused(host_library, case):
    entry, changes, names = REFUSED[case]

    assert host_library.call(entry, *(ACCEPTED[entry] | changes).values()) == host_library.codes["INVALID_ARGUMENT"]

    assert host_library.last_error().startswith(f"{entry}: ")
    assert names in host_library.last_error()
