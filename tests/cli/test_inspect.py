"""`te-hal inspect`: what a checkpoint holds is printed, nothing in it is run, bad files are refused."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING

import golden_values
import pytest
import safetensors.torch
import torch
from pickle_programs import archived, arrays, pickled

import te_hal.modules as te
from te_hal import recipe
from te_hal.cli.checkpoint import Checkpoint, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = golden_values.FOLDER / "te_checkpoint_delayed_hybrid_max.pt"


def trained(name: str = "delayed", *, fp8_weights: bool = False) -> torch.nn.Module:
    chosen = recipe.DelayedScaling(amax_history_len=4) if name == "delayed" else recipe.Float8CurrentScaling()
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=fp8_weights, recipe=chosen):
        model = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 64, params_dtype=torch.float32))
    with te.autocast(recipe=chosen):
        model(torch.randn(16, 32)).sum().backward()
    return model


def inspected(command_line, path: Path, exit_code: int = 0) -> dict:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    done = command_line.call("inspect", str(path), "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout, parse_constant=refuse)


def test_a_recorded_checkpoint_is_shown_tensor_by_tensor_and_slot_by_slot(command_line):
    found = inspected(command_line, RECORDED)
    saved = torch.load(RECORDED, weights_only=True)
    plain = {key: value for key, value in saved.items() if not key.endswith("_extra_state")}
    assert {tensor["name"]: tensor["nbytes"] for tensor in found["tensors"]} == {k: v.nbytes for k, v in plain.items()}
    assert (found["kind"], found["bytes"]) == ("torch.save", RECORDED.stat().st_size)
    state = next(each for each in found["extra_states"] if each["name"] == "self_attention.proj._extra_state")
    assert state["written_by"] == "Transformer Engine"
    assert state["state"]["fields"]["fp8_format"] == "HYBRID"
    history = torch.tensor(state["state"]["arrays"]["amax_history_fwd"])
    expected = torch.tensor(448.0) / history.amax(dim=0)[:2]  # by rule D3
    assert torch.equal(torch.tensor(state["state"]["arrays"]["scale_fwd"])[:2], expected)


def test_the_text_has_a_line_a_tensor_and_a_table_a_module(command_line):
    lines = command_line.call("inspect", str(RECORDED)).stdout.splitlines()
    assert "12 tensors, 264,960 bytes" in lines
    assert "  98,304  self_attention.layernorm_qkv.weight             bfloat16  384x128" in lines
    assert "    nothing recorded: scales are 1, histories 0" in lines  # attention
    rows = [line.split() for line in lines]
    assert ["input", "249.322", "1.79688", "1.79688"] in rows
    assert ["weight", "2", "1968.89", "0.227539", "0.227539"] in rows


def test_a_model_of_ours_in_every_kind_of_file_gives_the_same(command_line, tmp_path):
    state = trained().state_dict()
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    found = [inspected(command_line, tmp_path / name) for name in ("new.pt", "old.pt", "model.safetensors")]
    for each in found:
        each["tensors"].sort(key=lambda tensor: tensor["name"])
        each["extra_states"].sort(key=lambda state: state["name"])
    assert found[0]["tensors"] == found[1]["tensors"] == found[2]["tensors"]
    assert found[0]["extra_states"] == found[1]["extra_states"] == found[2]["extra_states"]
    assert [each["kind"] for each in found] == ["torch.save", "torch.save", "safetensors"]
    empty, full = found[0]["extra_states"]
    assert (empty["nbytes"], empty["written_by"], empty["state"]) == (0, "", None)
    assert full["written_by"] == "te_hal"


def test_training_state_is_walked_to_its_leaves(command_line, tmp_path):
    model = trained()
    optimizer = te.optimizers.FusedAdam(model.parameters(), exp_avg_dtype=torch.uint8)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "run.pt")
    found = inspected(command_line, tmp_path / "run.pt")
    names = {tensor["name"]: tensor["dtype"] for tensor in found["tensors"]}
    assert names["optimizer.state.2.exp_avg"] == "uint8"
    assert names["model.1.weight"] == "float32"
    assert found["others"]["step"] == 3
    assert found["others"]["optimizer.param_groups.0.lr"] == 1e-3


def test_weights_that_live_in_fp8_are_shown_with_their_codes(command_line, tmp_path):
    torch.save(trained("current", fp8_weights=True).state_dict(), tmp_path / "fp8.pt")
    found = {tensor["name"]: tensor for tensor in inspected(command_line, tmp_path / "fp8.pt")["tensors"]}
    weight = found["1.weight"]
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [64, 32], 64 * 32 + 4)
    assert weight["note"] == "E4M3 codes, scale per tensor, rowwise"


def test_a_tensor_of_two_quantizers_is_shown_with_both(command_line, tmp_path):
    quantizer = te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(torch.float8_e4m3fn), columnwise_quantizer=te.NVFP4Quantizer()
    )
    torch.save({"x": quantizer(torch.randn(32, 64).bfloat16())}, tmp_path / "model.pt")
    (found,) = inspected(command_line, tmp_path / "model.pt")["tensors"]
    assert found["note"] == "two parts, hybrid(E4M3/mxfp8/rowwise, E2M1/nvfp4/columnwise)"


def test_state_of_1x_is_shown(command_line, tmp_path):
    torch.save({"weight": torch.zeros(2), "_extra_state": archived(arrays())}, tmp_path / "old.pt")
    (state,) = inspected(command_line, tmp_path / "old.pt")["extra_states"]
    assert state["written_by"] == "Transformer Engine"
    assert state["state"]["arrays"]["scale_fwd"] == arrays()["scale_fwd"].tolist()


def test_a_checkpoint_of_compare_is_shown(command_line, tmp_path):
    path = tmp_path / "checkpoint"
    write_checkpoint(path, Checkpoint({"steps": 10}, {"torch": "x"}, {"run": {"weight": torch.zeros(3)}}))
    found = inspected(command_line, path)
    assert (found["kind"], found["others"]) == ("te-hal compare", {"config.steps": 10})
    assert [tensor["name"] for tensor in found["tensors"]] == ["state.run.weight"]


def test_infinities_are_shown_in_strict_json(command_line, tmp_path):
    model = trained()
    model[1].fp8_meta["scaling_fwd"].amax_history[1] = torch.tensor([float("inf"), float("nan"), 0.0])
    torch.save(model.state_dict(), tmp_path / "inf.pt")
    state = inspected(command_line, tmp_path / "inf.pt")["extra_states"][1]
    assert state["state"]["arrays"]["amax_history_fwd"][1] == ["inf", "nan", 0.0]


# Bad files


class _Runs:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.target}",)


def assert_refused(command_line, path: Path, words: str) -> None:
    done = command_line.call("inspect", str(path))
    assert done.exit_code == 2, done.output
    assert not done.stdout
    assert done.stderr.startswith(f"te-hal: {path}: got ")
    assert words in done.stderr
    assert "; accepted: " in done.stderr


@pytest.mark.parametrize("new", [True, False])
def test_a_file_that_would_run_something_is_refused_and_runs_nothing(command_line, tmp_path, new):
    target = tmp_path / "touched"
    torch.save({"weight": _Runs(target)}, tmp_path / "bad.pt", _use_new_zipfile_serialization=new)
    assert_refused(command_line, tmp_path / "bad.pt", "something that would have to be run: posix.system")
    assert not target.exists()


def test_a_whole_model_is_refused_with_what_to_save(command_line, tmp_path):
    torch.save(trained(), tmp_path / "model.pt")
    assert_refused(command_line, tmp_path / "model.pt", "save a state_dict, not the model itself")


def test_an_extra_state_that_would_run_something_is_refused_while_the_rest_is_shown(command_line, tmp_path):
    target = tmp_path / "touched"
    torch.save({"weight": torch.zeros(2), "_extra_state": pickled({"recipe": _Runs(target)})}, tmp_path / "bad.pt")
    done = command_line.call("inspect", str(tmp_path / "bad.pt"))
    assert done.exit_code == 1
    assert "weight" in done.stdout
    assert "refused" in done.stdout
    assert "1 extra states of" in done.stderr
    assert not target.exists()
    assert inspected(command_line, tmp_path / "bad.pt", exit_code=1)["extra_states"][0]["refused"]


@pytest.mark.parametrize("kind", ["new", "old", "safetensors"])
def test_every_truncation_is_refused(command_line, tmp_path, kind):
    state, path = {"weight": torch.arange(64.0)}, tmp_path / "cut"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "new")
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 24):
        path.write_bytes(whole[:length])
        assert_refused(command_line, path, "restore the file" if length > 8 else "got an")


OTHERS = {
    "not there": lambda _: None,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "a text": lambda path: path.write_text("once upon a time, there was a text of some length"),
    "a zip of something else": lambda path: path.write_bytes(zip_of_something()),
}


def zip_of_something() -> bytes:
    import zipfile  # noqa: PLC0415 - for this one case

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/readme", b"text")
    return buffer.getvalue()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_checkpoint_is_refused(command_line, tmp_path, name):
    OTHERS[name](tmp_path / "file")
    assert_refused(command_line, tmp_path / "file", "got a")


def test_safetensors_need_not_be_installed(command_line, tmp_path, monkeypatch):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert_refused(command_line, tmp_path / "model.safetensors", "install safetensors to read its files")
