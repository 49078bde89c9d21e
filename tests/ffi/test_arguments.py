"""Bad arguments are refused on the host, by name, before anything is written."""

import ctypes
import threading

import pytest
import torch
from native_cases import bytes_like
from native_table import struct

X = torch.randn(8, 16)
BIG = 2**40


def quantize_arguments(**changes):
    codes, turned = bytes_like(8, 16), bytes_like(16, 8)
    arguments = {
        "input": X.data_ptr(), "input_dtype": 1, "rows": 8, "cols": 16, "scale": torch.ones(1), "amax": torch.zeros(1),
        "rowwise_data": codes, "columnwise_data": turned, "columnwise_order": 0, "rowwise_scale_inv": torch.zeros(1),
        "columnwise_scale_inv": None, "output_dtype": 4, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def current_arguments(**changes):
    arguments = {
        "input": X.data_ptr(), "input_dtype": 1, "rows": 8, "cols": 16, "scale": None, "amax": None, "epsilon": 0.0,
        "flags": 0, "rowwise_data": bytes_like(8, 16), "columnwise_data": None, "columnwise_order": 0,
        "rowwise_scale_inv": None, "columnwise_scale_inv": None, "output_dtype": 4, "workspace": torch.empty(512),
        "workspace_size": 2048, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def block_arguments(**changes):
    arguments = {
        "input": X.data_ptr(), "input_dtype": 1, "rows": 8, "cols": 16, "mode": "MODE_BLOCK_1X128", "epsilon": 0.0,
        "flags": 0, "rowwise_data": bytes_like(8, 16), "rowwise_scale_inv": torch.zeros(8, 1), "row_stride": 1,
        "col_stride": 1, "columnwise_data": None, "columnwise_scale_inv": None, "columnwise_row_stride": 0,
        "columnwise_col_stride": 0, "columnwise_order": 0, "output_dtype": 4, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def dequantize_arguments(**changes):
    arguments = {
        "data": bytes_like(8, 16), "data_dtype": 4, "rows": 8, "cols": 16, "copy": 0, "mode": 1,
        "scale_inv": torch.ones(1), "row_stride": 0, "col_stride": 0, "output": torch.empty(8, 16), "output_dtype": 1,
        "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def amax_arguments(**changes):
    arguments = {
        "input": X.data_ptr(), "input_dtype": 1, "count": 128, "amax": torch.zeros(1), "flags": 0,
        "workspace": torch.empty(512), "workspace_size": 2048, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def scale_arguments(**changes):
    arguments = {
        "amax": torch.ones(4), "scale": torch.ones(4), "scale_inv": None, "count": 4, "fp8_max": 448.0, "epsilon": 0.0,
        "value_for_inf": 3e38, "flags": 0, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def update_arguments(**changes):
    arguments = {
        "history": torch.zeros(4, 2), "scale": torch.ones(2), "reduced": None, "length": 4, "count": 2,
        "fp8_max": 448.0, "margin": 0, "algo": 0, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def transpose_arguments(**changes):
    arguments = {"input": X, "output": torch.empty(16, 8), "rows": 8, "cols": 16, "element_bytes": 4, "stream": 0}
    return list((arguments | changes).values())


def nvfp4_arguments(**changes):
    arguments = {
        "input": torch.ones(32, 16), "input_dtype": 1, "rows": 32, "cols": 16, "mode": "MODE_NVFP4", "flags": 0,
        "seed_low": 0, "seed_high": 0, "rowwise_data": bytes_like(32, 8), "rowwise_scale_inv": torch.zeros(129),
        "columnwise_data": None, "columnwise_scale_inv": None, "workspace": torch.empty(1024), "workspace_size": 4096,
        "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


def nvfp4_decoding_arguments(**changes):
    arguments = {
        "data": bytes_like(32, 8), "rows": 32, "cols": 16, "copy": 0, "mode": "MODE_NVFP4",
        "scale_inv": torch.zeros(129), "flags": 0, "output": torch.empty(32, 16), "output_dtype": 1, "stream": 0,
    }  # fmt: skip
    return list((arguments | changes).values())


MAKERS = {
    "quantize": quantize_arguments, "quantize_current": current_arguments, "quantize_blocks": block_arguments,
    "dequantize": dequantize_arguments, "amax": amax_arguments, "compute_scale": scale_arguments,
    "update_delayed_scale": update_arguments, "transpose": transpose_arguments, "quantize_nvfp4": nvfp4_arguments,
    "dequantize_nvfp4": nvfp4_decoding_arguments,
}  # fmt: skip
NAN, INF = float("nan"), float("inf")

#: entry, what is changed, the status, and what its sentence names.
REFUSED = [
    ("quantize", {"input": None}, "INVALID_ARGUMENT", "input is null"),
    ("quantize", {"input": X.data_ptr() + 1}, "MISALIGNED", "input is 0x"),
    ("quantize", {"input": 2**64 - 4}, "INVALID_ARGUMENT", "no process has memory"),
    ("quantize", {"input": 2**57 - 4}, "INVALID_ARGUMENT", "no process has memory"),
    ("quantize", {"input": 4}, "INVALID_ARGUMENT", "no process has memory"),
    ("quantize", {"scale": None}, "INVALID_ARGUMENT", "scale is null"),
    ("quantize", {"rowwise_data": None, "columnwise_data": None}, "INVALID_ARGUMENT", "both null"),
    ("quantize", {"rowwise_data": X}, "OVERLAP", "input and rowwise_data"),
    ("quantize", {"rows": -1}, "INVALID_ARGUMENT", "rows is -1"),
    ("quantize", {"rows": BIG, "cols": BIG}, "SIZE_OVERFLOW", "less than 2^60"),
    ("quantize", {"input_dtype": 4}, "INVALID_ARGUMENT", "input_dtype is 4"),
    ("quantize", {"input_dtype": -9}, "INVALID_ARGUMENT", "input_dtype is -9"),
    ("quantize", {"output_dtype": 3}, "INVALID_ARGUMENT", "output_dtype is 3"),
    ("quantize", {"columnwise_order": 2}, "INVALID_ARGUMENT", "columnwise_order is 2"),
    ("quantize_current", {"workspace": None}, "INVALID_ARGUMENT", "workspace is null"),
    ("quantize_current", {"workspace_size": 2047}, "WORKSPACE_TOO_SMALL", "2048 or more"),
    ("quantize_current", {"epsilon": NAN}, "INVALID_ARGUMENT", "epsilon is nan"),
    ("quantize_current", {"epsilon": -1.0}, "INVALID_ARGUMENT", "epsilon is -1"),
    ("quantize_current", {"flags": 1}, "INVALID_ARGUMENT", "flags are 0x1"),
    ("quantize_blocks", {"mode": 1}, "INVALID_ARGUMENT", "mode is 1"),
    ("quantize_blocks", {"mode": "MODE_NVFP4"}, "INVALID_ARGUMENT", "accepted by quantize_nvfp4"),
    ("quantize_blocks", {"row_stride": 0}, "INVALID_ARGUMENT", "row stride is 0"),
    ("quantize_blocks", {"row_stride": 2**62}, "SIZE_OVERFLOW", "row stride"),
    ("quantize_blocks", {"rowwise_scale_inv": None}, "INVALID_ARGUMENT", "rowwise_scale_inv is null"),
    ("quantize_blocks", {"rowwise_data": None}, "INVALID_ARGUMENT", "both null"),
    ("quantize_blocks", {"mode": "MODE_MXFP8", "epsilon": 1.0}, "INVALID_ARGUMENT", "epsilon"),
    ("quantize_blocks", {"mode": "MODE_MXFP8", "flags": 2}, "INVALID_ARGUMENT", "flags"),
    ("dequantize", {"mode": 0}, "INVALID_ARGUMENT", "mode is 0"),
    ("dequantize", {"mode": 6}, "INVALID_ARGUMENT", "accepted by dequantize_nvfp4"),
    ("dequantize", {"copy": 3}, "INVALID_ARGUMENT", "copy is 3"),
    ("dequantize", {"output": None}, "INVALID_ARGUMENT", "output is null"),
    ("quantize_blocks", {"mode": "MODE_MTFP8_1X128", "flags": 2}, "INVALID_ARGUMENT", "flags"),
    ("quantize_blocks", {"mode": "MODE_MTFP8_128X128", "epsilon": 1.0}, "INVALID_ARGUMENT", "epsilon"),
    ("quantize_nvfp4", {"rows": 24}, "INVALID_ARGUMENT", "multiples of 16"),
    ("quantize_nvfp4", {"cols": 2**59}, "SIZE_OVERFLOW", "less than 2^60"),
    ("quantize_nvfp4", {"rows": 2**63 - 1, "cols": 0}, "SIZE_OVERFLOW", "less than 2^60"),
    ("quantize_nvfp4", {"mode": "MODE_MXFP8"}, "INVALID_ARGUMENT", "mode is 5"),
    ("quantize_nvfp4", {"mode": "MODE_NVFP4_16X16", "flags": 64}, "INVALID_ARGUMENT", "flags are 0x40"),
    ("quantize_nvfp4", {"seed_high": 1}, "INVALID_ARGUMENT", "without TE_HAL_FLAG_BY_CHANCE"),
    ("quantize_nvfp4", {"rowwise_data": None}, "INVALID_ARGUMENT", "rowwise_data is null"),
    ("quantize_nvfp4", {"rowwise_scale_inv": None}, "INVALID_ARGUMENT", "both null"),
    ("quantize_nvfp4", {"rowwise_scale_inv": X.data_ptr() + 2}, "MISALIGNED", "rowwise_scale_inv is 0x"),
    ("quantize_nvfp4", {"rowwise_data": X, "rowwise_scale_inv": X.data_ptr()}, "OVERLAP", "rowwise_"),
    ("quantize_nvfp4", {"workspace_size": 4095}, "WORKSPACE_TOO_SMALL", "4096 or more"),
    ("dequantize_nvfp4", {"copy": 2}, "INVALID_ARGUMENT", "copy is 2"),
    ("dequantize_nvfp4", {"mode": 1}, "INVALID_ARGUMENT", "mode is 1"),
    ("dequantize_nvfp4", {"flags": 1}, "INVALID_ARGUMENT", "flags are 0x1"),
    ("dequantize_nvfp4", {"cols": 8}, "INVALID_ARGUMENT", "multiples of 16"),
    ("dequantize_nvfp4", {"scale_inv": None}, "INVALID_ARGUMENT", "scale_inv is null"),
    ("amax", {"amax": None}, "INVALID_ARGUMENT", "amax is null"),
    ("amax", {"amax": X}, "OVERLAP", "input and amax"),
    ("amax", {"count": -5}, "INVALID_ARGUMENT", "count is -5"),
    ("amax", {"count": 2**61}, "SIZE_OVERFLOW", "count"),
    ("compute_scale", {"fp8_max": 0.0}, "INVALID_ARGUMENT", "fp8_max"),
    ("compute_scale", {"fp8_max": NAN}, "INVALID_ARGUMENT", "fp8_max"),
    ("compute_scale", {"value_for_inf": NAN}, "INVALID_ARGUMENT", "value_for_inf"),
    ("compute_scale", {"fp8_max": 1e-60}, "INVALID_ARGUMENT", "fp8_max is 1e-60; accepted: above 0"),
    ("compute_scale", {"fp8_max": 2.0**-150}, "INVALID_ARGUMENT", "fp8_max"),
    ("compute_scale", {"fp8_max": 1e39}, "INVALID_ARGUMENT", "fp8_max is 1e+39"),
    ("compute_scale", {"epsilon": INF}, "INVALID_ARGUMENT", "epsilon is inf"),
    ("compute_scale", {"epsilon": 2.0**128 - 2.0**103}, "INVALID_ARGUMENT", "epsilon"),
    ("compute_scale", {"value_for_inf": 0.0}, "INVALID_ARGUMENT", "value_for_inf is 0"),
    ("compute_scale", {"value_for_inf": -1.0}, "INVALID_ARGUMENT", "value_for_inf is -1"),
    ("compute_scale", {"value_for_inf": INF}, "INVALID_ARGUMENT", "value_for_inf is inf"),
    ("quantize_current", {"epsilon": 1e39}, "INVALID_ARGUMENT", "epsilon is 1e+39"),
    ("quantize_blocks", {"epsilon": 1e39}, "INVALID_ARGUMENT", "epsilon is 1e+39"),
    ("dequantize", {"row_stride": 1}, "INVALID_ARGUMENT", "strides"),
    ("update_delayed_scale", {"margin": 101}, "INVALID_ARGUMENT", "margin is 101; accepted: -100 to 100"),
    ("update_delayed_scale", {"margin": -101}, "INVALID_ARGUMENT", "margin is -101"),
    ("update_delayed_scale", {"fp8_max": 1e-60}, "INVALID_ARGUMENT", "fp8_max is 1e-60"),
    ("update_delayed_scale", {"length": 0}, "INVALID_ARGUMENT", "length is 0"),
    ("update_delayed_scale", {"algo": 2}, "INVALID_ARGUMENT", "algo is 2"),
    ("update_delayed_scale", {"scale": None}, "INVALID_ARGUMENT", "scale is null"),
    ("transpose", {"element_bytes": 3}, "INVALID_ARGUMENT", "element_bytes"),
    ("transpose", {"output": X}, "OVERLAP", "input and output"),
]


@pytest.mark.parametrize(
    ("entry", "changes", "status", "names"), REFUSED, ids=lambda value: value if isinstance(value, str) else None
)
def test_a_bad_argument_is_named(host_library, entry, changes, status, names):
    arguments = MAKERS[entry](**changes)
    written = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    before = [tensor.clone() for tensor in written]

    assert host_library.call(entry, *arguments) == host_library.codes[status]

    assert host_library.last_error().startswith(f"{entry}: ")
    assert names in host_library.last_error()
    for tensor, copy in zip(written, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


@pytest.mark.parametrize("entry", MAKERS)
def test_the_same_arguments_unchanged_are_accepted(host_library, entry):
    assert host_library.call(entry, *MAKERS[entry]()) == 0


@pytest.mark.parametrize("entry", ["quantize_blocks", "dequantize", "transpose"])
def test_no_elements_need_no_memory(host_library, entry):
    arguments = [None if isinstance(a, torch.Tensor) else a for a in MAKERS[entry](rows=0)]

    assert host_library.call(entry, *arguments) == 0


def ask(library, **fields):
    kind = struct("te_hal_call")
    call = kind(struct_size=ctypes.sizeof(kind), **fields)
    return library.call("supports", ctypes.addressof(call))


def test_supports_answers_yes_or_no_with_a_sentence(host_library):
    quantize = {"op": 5, "input_dtype": 3, "output_dtype": 4, "output_mode": 1}

    assert ask(host_library, **quantize) == 0
    assert ask(host_library, **quantize | {"output_mode": 6}) == host_library.codes["UNSUPPORTED"]
    assert "NVFP4" in host_library.last_error()
    assert ask(host_library, **quantize | {"output_mode": 6, "output_dtype": 6}) == 0
    hadamard = quantize | {"output_mode": 8, "output_dtype": 6, "input_dtype": 1}
    assert ask(host_library, **hadamard, flags=host_library.codes["FLAG_ROWWISE"]) == 0
    assert ask(host_library, **hadamard, flags=host_library.codes["FLAG_COLUMNWISE"]) != 0
    assert ask(host_library, **quantize | {"output_dtype": 3}) == host_library.codes["UNSUPPORTED"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"op": 0}, {"op": 99}, {"flags": 1 << 20}, {"rows": -1}, {"input_mode": 77}),
        *({"kind": 77}, {"kind": -1}, {"output_mode": 3}, {"op": 21, "kind": 1}, {"op": 7, "kind": 3}),
        *({"op": 9, "kind": 0}, {"op": 11, "kind": 3}, {"op": 13, "kind": 13}, {"op": 19, "kind": 0}),
        {"op": 13, "kind": 1, "output_dtype": 1, "output_mode": 1},
    ],
    ids=str,
)
def test_supports_refuses_what_makes_no_sense(host_library, changes):
    assert ask(host_library, **{"op": 2, "input_dtype": 1} | changes) == host_library.codes["INVALID_ARGUMENT"]


@pytest.mark.parametrize("sizes", [{"rows": BIG, "cols": BIG}, {"op": 7, "output_dtype": 1, "cols": BIG, "depth": BIG}])
def test_supports_refuses_sizes_that_multiply_to_too_much(host_library, sizes):
    call = {"op": 2, "input_dtype": 1, "other_dtype": 1} | sizes

    assert ask(host_library, **call) == host_library.codes["SIZE_OVERFLOW"]


def test_workspace_bytes_is_negative_for_what_makes_no_sense(host_library):
    assert host_library.call("workspace_bytes", "OP_AMAX", 0, 1, 0, 100, 1) == 2048
    assert host_library.call("workspace_bytes", 99, 0, 1, 0, 100, 1) == -host_library.codes["INVALID_ARGUMENT"]
    assert host_library.call("workspace_bytes", 2, 0, 1, 0, BIG, BIG) == -host_library.codes["SIZE_OVERFLOW"]


def test_hadamards_transform_takes_bf16_alone(host_library):
    columnwise = {"columnwise_data": bytes_like(16, 16), "columnwise_scale_inv": torch.zeros(129)}
    arguments = nvfp4_arguments(mode="MODE_NVFP4_HADAMARD", **columnwise)

    assert host_library.call("quantize_nvfp4", *arguments) == host_library.codes["UNSUPPORTED"]
    assert "takes bf16 alone" in host_library.last_error()


def test_an_nvfp4_tensor_without_elements_has_an_amax_of_zero(host_library):
    scale_inv = torch.full((1,), 7.0)
    arguments = nvfp4_arguments(cols=0, input=None, rowwise_data=None, rowwise_scale_inv=scale_inv)

    assert host_library.call("quantize_nvfp4", *arguments) == 0
    assert scale_inv.item() == 0.0


def test_errors_belong_to_the_thread_that_made_them(host_library):
    host_library.call("amax", *amax_arguments(count=-5))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(host_library.last_error()))
    thread.start()
    thread.join()

    assert seen == [""]
    assert "count is -5" in host_library.last_error()
