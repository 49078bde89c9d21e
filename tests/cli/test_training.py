"""A run: the same start and data for every precision, and a state that holds all of it."""

import pytest
import torch

from te_hal.cli.config import CONTEXT, CompareConfig
from te_hal.cli.precision import precision
from te_hal.cli.text import load_text
from te_hal.cli.training import Run, learning_rate

CONFIG = CompareConfig(steps=20, width=32, layers=1, batch=16)
NAMES = ("bf16", "fp32", "delayed", "current")


@pytest.fixture(scope="module")
def text():
    return load_text(None, CONTEXT)


def make_run(name, text, config=CONFIG):
    return Run(precision(name), config, text, torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_run_has_the_masters_and_the_batches_of_the_first(text, name):
    first, other = make_run("bf16", text), make_run(name, text)
    pairs = zip(first.optimizer.state_dict()["masters"], other.optimizer.state_dict()["masters"], strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for _ in range(3):
        assert torch.equal(first.windows(16), other.windows(16))


def test_another_seed_is_another_start_and_another_order(text):
    first = make_run("fp32", text)
    other = make_run("fp32", text, CompareConfig(steps=20, width=32, layers=1, batch=16, seed=1))
    assert not torch.equal(first.model.entry.weight, other.model.entry.weight)
    assert not torch.equal(first.windows(16), other.windows(16))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_learns(text, name):
    run = make_run(name, text)
    before = run.evaluate()
    for _ in range(20):
        run.step()
    assert run.evaluate() < before - 0.5
    assert run.result.nonfinite_values == 0


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_runs_compute_otherwise_than_bf16(text, name):
    assert make_run(name, text).evaluate() != make_run("bf16", text).evaluate()


def test_the_loss_of_fp32_is_that_of_plain_torch(text):
    run = make_run("fp32", text)
    windows = run.windows(16)
    model, plain = run.model, torch.nn.functional
    hidden = plain.linear(model.embedding(windows[:, :-1].long()).flatten(1), model.entry.weight, model.entry.bias)
    block = model.blocks[0]
    normed = plain.layer_norm(hidden, (32,), block.norm.weight, block.norm.bias)
    widened = plain.gelu(plain.linear(normed, block.widen.weight, block.widen.bias), approximate="tanh")
    hidden = hidden + plain.linear(widened, block.narrow.weight, block.narrow.bias)
    logits = model.head(plain.layer_norm(hidden, (32,), model.norm.weight, model.norm.bias))
    expected = plain.cross_entropy(logits, windows[:, -1].long())
    torch.testing.assert_close(run.loss(windows), expected, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_then_falls_to_a_twentieth():
    config = CompareConfig(steps=400, lr=1.0)
    rates = [learning_rate(step, config) for step in range(400)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates.index(max(rates)) in range(18, 21)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)


def test_held_out_loss_is_taken_ten_times_and_at_the_end(text):
    run = make_run("fp32", text, CompareConfig(steps=25, width=32, layers=1, batch=8))
    taken = []
    for step in range(1, 26):
        run.step()
        taken += [step] if run.evaluation_is_due else []
    assert taken == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25]
