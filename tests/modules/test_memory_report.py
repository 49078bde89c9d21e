"""memory_report against a live count of tensors, and what it says of each."""

from __future__ import annotations

import gc

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.cli.memory import LiveBytes
from te_hal.schema.errors import ArgumentTypeError

RECIPES = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
}


def build(name: str, *, fp8_weights: bool, keep: bool = False) -> torch.nn.Module:
    with te.quantized_model_init(
        enabled=fp8_weights, recipe=RECIPES[name]() or RECIPES["current"](), preserve_high_precision_init_val=keep
    ):
        return torch.nn.Sequential(
            te.LayerNormLinear(64, 128, params_dtype=torch.bfloat16),
            te.Linear(128, 64, params_dtype=torch.bfloat16),
        )


def step(model: torch.nn.Module, name: str, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with te.autocast(enabled=name != "none", recipe=RECIPES[name]()):
        for module in model:
            x = module(x, is_first_microbatch=True)
    x.float().square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "fp8_weights"), [("none", False), *((name, on) for name in ("current", "delayed") for on in (False, True))]
)
def test_the_bytes_are_those_of_all_tensors_that_are_alive(name, fp8_weights):
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = build(name, fp8_weights=fp8_weights, keep=True)
        optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True, exp_avg_dtype=torch.uint8)
        step(model, name, optimizer)
        return model, optimizer

    trained()  # the backend's own scratch memory is there from now on
    gc.collect()
    with LiveBytes() as live:
        model, optimizer = trained()
        gc.collect()
        alive = live.now
    report = te.memory_report(model, optimizer)
    assert report.nbytes == alive
    assert sum(report.by_kind().values()) == alive


def test_every_tensor_says_what_it_is_for():
    model = build("delayed", fp8_weights=False)
    optimizer = te.optimizers.FusedAdam(model.parameters())
    step(model, "delayed", optimizer)
    entries = {entry.name: entry for entry in te.memory_report(model, optimizer).entries}
    assert (entries["0.weight"].kind, entries["0.weight"].nbytes) == ("parameter", 2 * 64 * 128)
    assert entries["0.weight.grad"].kind == "gradient"
    assert entries["1.weight: exp_avg"].nbytes == 4 * 64 * 128
    kept = [entry for name, entry in entries.items() if name.startswith("1.weight (kept)")]
    assert sum(entry.nbytes for entry in kept) >= 64 * 128 + 4
    assert all("clear_weight_caches()" in entry.why for entry in kept)
    assert entries["0.scaling_fwd.amax_history"].nbytes == 4 * 4 * 3
    assert "zero_grad" in entries["0.weight.grad"].why


def test_what_is_dropped_is_gone_from_the_report():
    model = build("current", fp8_weights=True, keep=True)
    before = te.memory_report(model)
    assert before.by_kind()["preserved value"] == 2 * 2 * 64 * 128
    for module in model:
        module.weight.clear_high_precision_init_val()
    after = te.memory_report(model)
    assert "preserved value" not in after.by_kind()
    assert before.nbytes - after.nbytes == 2 * 2 * 64 * 128


def test_shared_memory_counts_once_and_says_whose_it_is():
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    report = te.memory_report(torch.nn.Sequential(first, second))
    assert report.nbytes == 64
    assert report.entries[1].why == "the memory of 0.weight"


def test_a_model_on_the_meta_device_holds_nothing():
    assert te.memory_report(te.Linear(32, 32, device="meta")).nbytes == 0


def test_it_prints_a_line_a_tensor_and_a_sum():
    lines = str(te.memory_report(te.Linear(32, 16, params_dtype=torch.float32))).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["2,048", "weight"], ["64", "bias"]]
    assert lines[2] == "2,112 bytes: parameter 2,112"
    assert str(te.memory_report(torch.nn.Identity())) == "0 bytes"


@pytest.mark.parametrize("arguments", [(3,), (torch.nn.Identity(), "adam")], ids=str)
def test_something_else_is_refused(arguments):
    with pytest.raises(ArgumentTypeError, match="memory_report: "):
        te.memory_report(*arguments)
