"""What memory cannot hold is refused before it is made."""

import resource
import subprocess
import sys

import pytest
import torch

from te_hal.cli import size
from te_hal.cli.config import configure
from te_hal.cli.memory import measure_memory
from te_hal.cli.models import KINDS
from te_hal.cli.precision import precision
from te_hal.cli.text import load_text

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(("width", "layers"), [(16, 1), (64, 3)])
@pytest.mark.parametrize("model", KINDS)
def test_the_parameters_are_those_of_the_model(model, width, layers):
    config = configure(model, width=width, layers=layers)
    kind = KINDS[model]
    assert kind.parameter_count(config) == sum(p.numel() for p in kind.build(config, CPU).parameters())


def test_the_parameters_with_experts_are_those_of_the_model():
    config, kind = configure("gpt", width=32, layers=3, experts=5, top_k=1), KINDS["gpt"]
    assert kind.parameter_count(config) == sum(p.numel() for p in kind.build(config, CPU).parameters())


@pytest.mark.parametrize(
    "config",
    [
        configure("mlp", width=256, layers=2, batch=8),
        configure("mlp", width=32, layers=2, batch=512),
        configure("gpt", width=256, layers=1, batch=1, sequence=8),
        configure("gpt", width=64, layers=2, heads=2, batch=16, sequence=64),
        configure("gpt", width=64, layers=2, heads=2, batch=16, sequence=64, experts=4),
    ],
    ids=["parameters", "activations", "parameters of a gpt", "activations of a gpt", "activations with experts"],
)
def test_the_estimate_is_close_to_what_a_step_is_measured_to_hold(config):
    peak = measure_memory(precision("fp32"), config, load_text(None, 64), CPU).peak_bytes
    objects = config.layers * size._OBJECTS_PER_LAYER
    assert 0.7 * peak < size.estimated_bytes(config) - objects < 1.2 * peak


@pytest.mark.parametrize(
    "options",
    [("--layers", "100000000", "--width", "16"), ("--width", "16000000"), ("--batch", str(2**40))],
    ids=lambda options: options[0],
)
def test_a_size_without_bounds_is_one_message_and_code_2_before_anything_is_made(command_line, options):
    result = command_line.compare(*options)
    assert result.exit_code == 2
    assert "--width, --layers, --batch, --sequence: got a model of" in result.stderr
    assert "memory that are free for cpu tensors" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not command_line.out.exists()


def test_a_limit_of_the_process_counts_too(tmp_path):
    limit = 4 * GIB
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "te_hal.cli",
            "compare",
            "--heads",
            "8",
            "--width",
            "16000",
            "--layers",
            "1",
            "--out",
            str(tmp_path),
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "whose training takes about" in done.stderr


@pytest.mark.parametrize(
    ("written", "free"),
    [("4096\n", 4096), ("max\n", 2**63), (None, 2**63)],
    ids=["limited", "unlimited", "no such file"],
)
def test_a_container_s_limit_is_read(tmp_path, written, free):
    if written is not None:
        (tmp_path / "memory.max").write_text(written)
    assert size._free_in_group(tmp_path) == free


def test_a_device_whose_torch_module_cannot_tell_refuses_nothing(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _device: object())
    size.check_size(configure("mlp", width=16000), torch.device("cuda"))


def test_the_free_memory_of_a_device_is_asked_of_its_torch_module(monkeypatch):
    class Module:
        @staticmethod
        def mem_get_info(_device):
            return 7, 9

    monkeypatch.setattr(torch, "get_device_module", lambda _device: Module)
    assert size.free_bytes(torch.device("cuda")) == 7
