"""te-hal conformance, and the same cases under pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from te_hal.cli.app import app
from te_hal.testing.case import cases

TESTS = Path(__file__).resolve().parent.parent
FAULTY = ("--backend", "faulty", "--factory", "crashing_backend:create_backend", "-j", "0")


def run(*arguments: str):
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_a_backend_that_does_what_it_should_gets_a_certificate(tmp_path):
    path = tmp_path / "mine.json"
    ended = run("--backend", "cpu_reference", "--op", "amax", "--quick", "-j", "0", "--json", str(path))
    assert ended.exit_code == 0, ended.output
    assert "backend cpu_reference conforms: 12 cases (chosen), 0 failed" in ended.output
    document = json.loads(path.read_text())
    assert document["clean"]
    assert document["ops"]["amax"]["cases"] == {"passed": 12}


def test_a_case_that_is_pasted_back_runs_alone():
    ended = run("--backend", "cpu_reference", "--case", "gemm:layout=dgrad", "-j", "0")
    assert ended.exit_code == 0, ended.output
    assert "1 cases (chosen)" in ended.output


def test_a_backend_without_entry_point_comes_from_its_factory():
    ended = run(*FAULTY, "--case", "amax:shape=13x37")
    assert ended.exit_code == 0, ended.output


def test_what_fails_ends_with_code_1():
    ended = run("--backend", "null", "--case", "amax:values=any_bits", "-j", "0")
    assert ended.exit_code == 1
    assert "amax: NaN or infinity in the wrong place" in ended.output
    assert "--case 'amax:values=any_bits'" in ended.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "nosuch"), "nosuch"),
        (("--backend", "null", "--op", "relu"), "name at least one op"),
        (("--backend", "null", "--op", "("), "a regular expression"),
        (("--backend", "null", "--case", "amax:shape=2x"), "copy a whole id"),
        (("--backend", "null", "--mode", "perf", "--json", "x"), "--json go with --mode test"),
        (("--backend", "null", "--mode", "support", "--quick", "-j", "2"), "--quick and --jobs go with --mode test"),
        (("--backend", "null", "--mode", "grad", "--op", "("), "a regular expression"),
        (("--backend", "null", "--json", "/no/such/folder/a.json"), "make the folder"),
        (("--backend", "null", "--case", "amax:shape=13x37", "--op", "gemm"), "got --op beside it"),
        (("--backend", "null", "--case", "amax:shape=13x37", "--quick"), "got --quick beside it"),
        (("--backend", "null", "--mode", "perf", "--op", "relu"), "name at least one op"),
        (("--backend", "null", "--case", "amax:shape=1,shape=13x37", "-j", "0"), "got shape twice"),
        (("--backend", "null", "--device", "foo", "-j", "0"), "got 'foo', of which torch says"),
        (("--backend", "null", "--device", "meta", "-j", "0"), "a device that backend null serves"),
        (("--backend", "null", "--lists", "/no/such/folder", "-j", "0"), "got '/no/such/folder', no folder"),
    ],
    ids=[
        "backend",
        "op",
        "regex",
        "case",
        "mode",
        "mode_options",
        "mode_regex",
        "json",
        "case_op",
        "case_quick",
        "mode_op",
        "case_axis",
        "device",
        "device_without_data",
        "lists",
    ],
)
def test_what_cannot_be_run_is_refused_with_code_2(arguments, words):
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert words in ended.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that torch lacks here")
def test_a_device_that_torch_was_not_built_for_is_refused_in_one_sentence():
    ended = run("--backend", "null", "--device", "cuda", "--op", "amax", "-j", "0")
    assert ended.exit_code == 2
    assert "te-hal: device: got 'cuda', of which torch says" in ended.output
    assert ended.output.count("\n") == 1


def test_a_backend_in_plain_torch_is_not_said_to_allocate_on_its_own():
    ended = run("--backend", "null", "--case", "amax:values=any_bits", "-j", "0")
    assert "memory that the kit did not make" not in ended.output


def test_mode_grad_holds_backward_ops_against_slopes():
    ended = run("--backend", "cpu_reference", "--mode", "grad", "--op", "rmsnorm_bwd|gemm")
    assert ended.exit_code == 0, ended.output
    assert ended.output.count("passed") == 4


def test_mode_grad_finds_a_gradient_that_is_wrong():
    ended = run("--backend", "null", "--mode", "grad", "--op", "rmsnorm_bwd")
    assert ended.exit_code == 1
    assert "from the slope" in ended.output


def test_mode_support_says_of_every_case_whether_it_is_supported():
    ended = run("--backend", "cpu_reference", "--mode", "support", "--op", "bias_grad")
    lines = ended.output.splitlines()
    assert lines[0] == "case,supported,reason"
    assert lines[1] == '"bias_grad:everyday",no_kernel,"has no kernel for bias_grad"'


def test_mode_perf_measures_the_ops_that_are_there():
    ended = run("--backend", "cpu_reference", "--mode", "perf", "--op", "amax|bias_grad")
    assert ended.exit_code == 0, ended.output
    assert [line.split()[0] for line in ended.output.splitlines()] == ["op", "amax"]


def test_pytest_runs_the_same_cases():
    command = ["-m", "pytest", "-p", "te_hal.testing.plugin", "-p", "no:cacheprovider", "--pyargs", "te_hal.testing"]
    options = ["--te-hal-backend", "cpu_reference", "--te-hal-op", "amax|bias_grad", "--te-hal-quick", "-q", "-rs"]
    ended = subprocess.run(
        [sys.executable, *command, *options],
        cwd=TESTS.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ran, composed = (len(cases(op, quick=True)) for op in ("amax", "bias_grad"))
    assert f"{ran} passed, {composed} skipped" in ended.stdout
    assert "composed: has no kernel for bias_grad" in ended.stdout
