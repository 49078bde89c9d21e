"""Saved calls: what the file holds, who reads it, and what running it again says."""

from __future__ import annotations

import pytest
import torch
from command_line import CommandLine
from planted_fault import one_element, one_percent, plant

import te_hal
from te_hal import ops
from te_hal.schema.errors import BackendNotFoundError, CheckpointError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage
from te_hal.shadowing import ShadowWarning, replay
from te_hal.shadowing.call_file import read_call

OPS = {
    "amax": ops.amax,
    "gemm": lambda x: ops.gemm(x, x, out_dtype=torch.float32),
    "quantize": lambda x: ops.quantize(
        x, None, dtype=torch.float8_e4m3fn, mode="mxfp8", columnwise=True, columnwise_order="same"
    ),
    "dequantize": lambda x: ops.dequantize(
        ops.quantize(x, torch.ones(1), dtype=torch.float8_e5m2), out_dtype=torch.float32
    ),
    "softmax_fwd": lambda x: ops.softmax_fwd(x[None, None], causal="top_left", window=(3, 0)),
}


def saved(op, folder):
    """The file of a fault in one op."""
    backend = plant(op, one_element if op == "quantize" else one_percent)
    with te_hal.shadow(backend, folder=folder) as shadow, pytest.warns(ShadowWarning):
        OPS[op](torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    return shadow.difference.file


@pytest.mark.parametrize("op", OPS)
def test_a_saved_call_differs_again_and_with_the_same_bytes(op, tmp_path) -> None:
    path = saved(op, tmp_path)
    again = replay(path)
    assert again.saved.op == op
    assert again.findings == tuple(again.saved.about["findings"])
    assert (again.as_saved, again.steady) == (True, True)


@pytest.mark.parametrize("op", OPS)
def test_a_saved_call_keeps_its_contract_on_a_right_backend(op, tmp_path) -> None:
    again = replay(saved(op, tmp_path), "cpu_reference")
    assert again.findings == ()
    assert not again.as_saved


def test_a_file_is_read_without_running_anything_in_it(tmp_path) -> None:
    content = torch.load(saved("quantize", tmp_path), weights_only=True)
    assert content["arguments"]["mode"] == "mxfp8"
    assert content["about"]["versions"]["torch"] == torch.__version__


def test_arguments_come_back_as_they_were(tmp_path) -> None:
    call = read_call(saved("quantize", tmp_path))
    assert call.arguments["mode"] is ScalingMode.MXFP8
    assert call.arguments["columnwise_order"] is ColumnwiseOrder.SAME
    assert call.arguments["dtype"] is torch.float8_e4m3fn
    storage = read_call(saved_dequantize(tmp_path)).arguments["input"]
    assert isinstance(storage, QuantizedStorage)
    assert repr(storage.kind) == "E5M2/tensor/rowwise"


def saved_dequantize(folder):
    te_hal.reset()
    return saved("dequantize", folder)


def test_several_differences_never_overwrite_a_file(tmp_path) -> None:
    names = set()
    for _ in range(3):
        te_hal.reset()
        names.add(saved("amax", tmp_path).name)
    assert len(names) == 3


@pytest.mark.parametrize("harm", ["cut", "altered", "other", "missing", "pickle"])
def test_a_file_that_is_no_saved_call_is_refused(harm, tmp_path) -> None:
    path = saved("amax", tmp_path)
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "altered":
        path.write_bytes(content[:64] + b"\0" * 64 + content[128:])
    elif harm == "other":
        torch.save({"kind": "something"}, path)
    elif harm == "pickle":
        torch.save({"kind": print}, path)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="name another file"):
        replay(path)


def test_a_backend_that_is_not_here_is_refused(tmp_path) -> None:
    path = saved("amax", tmp_path)
    te_hal.reset()
    with pytest.raises(BackendNotFoundError, match="faulty"):
        replay(path)


def test_the_command_says_what_the_function_does_and_ends_with_1_where_it_differs(tmp_path) -> None:
    path, line = saved("gemm", tmp_path), CommandLine(tmp_path)
    done = line.call("replay", str(path))
    assert done.exit_code == 1
    assert done.stdout.rstrip("\n") == str(replay(path))
    assert "the bytes of the saved result" in done.stdout
    done = line.call("replay", str(path), "--backend", "cpu_reference")
    assert done.exit_code == 0
    assert "keeps its contract" in done.stdout
    assert line.call("replay", str(tmp_path / "none")).exit_code == 2
