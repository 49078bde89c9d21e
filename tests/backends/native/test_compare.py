"""`te-hal compare` on the native backends: every op keeps its contract, and losses are nearly cpu_reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from command_line import TINY_GPT, CommandLine
from native_backends import LOSSES_APART

import te_hal
from te_hal.cli.config import configure
from te_hal.cli.precision import precision
from te_hal.cli.text import load_text
from te_hal.cli.training import Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from native_backends import NativeBackend

STEPS = 10
SIZES = {"steps": STEPS, "width": 32, "layers": 2}
CONFIGS = {
    "gpt": configure("gpt", **SIZES, heads=2, sequence=16, batch=4, lr=0.01),
    "mlp": configure("mlp", **SIZES, batch=16),
}


@pytest.fixture(autouse=True)
def _forget_the_backend() -> Iterator[None]:
    yield
    te_hal.reset()


def train(backend: str, device: str, name: str, model: str) -> Run:
    with te_hal.use_backend(backend):
        run = Run(precision(name), CONFIGS[model], load_text(None, 64), torch.device(device))
        for _ in range(STEPS):
            run.step()
    return run


def test_the_command_trains_on_it(native: NativeBackend, tmp_path: Path) -> None:
    command_line = CommandLine(tmp_path)
    result = command_line.compare(*TINY_GPT, "--steps", "2", "--backend", native.name)
    assert result.exit_code == 0, result.stderr
    record = command_line.record()
    assert record["config"]["backend"] == native.name
    assert [run["steps"] for run in record["runs"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("model", CONFIGS)
def test_every_op_of_ten_steps_keeps_its_contract(model: str, name: str, native: NativeBackend, tmp_path: Path) -> None:
    with te_hal.shadow(native.name, on_difference="raise", folder=tmp_path) as held:
        found = train(native.name, native.device, name, model).result.loss
    expected = train("cpu_reference", "cpu", name, model).result.loss
    assert found == pytest.approx(expected, rel=LOSSES_APART[native.name])
    calls = {op: count.compared for op, count in held.cost.ops.items()}
    casts = sum(calls.get(op, 0) for op in ("quantize", "quantize_current", "bias_grad_quantize"))
    # Weights and gradients of at least four linear layers, at each step; inputs may be cast with what makes them.
    assert casts >= 8 * STEPS
    updates = sum(calls.get(op, 0) for op in ("update_delayed_scale", "update_delayed_scales"))
    assert (updates >= 2 * (STEPS - 1)) is (name == "delayed")
