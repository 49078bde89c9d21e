"""A run: the same start and data for every precision, and a state that holds all of it."""

import pytest
import torch

import te_hal.modules as te
from te_hal.cli.config import configure
from te_hal.cli.precision import precision
from te_hal.cli.text import load_text
from te_hal.cli.training import Run, learning_rate

SIZES = {"steps": 20, "width": 32, "layers": 1, "batch": 16}
CONFIGS = {
    "mlp": configure("mlp", **SIZES),
    "gpt": configure("gpt", **{**SIZES, "heads": 2, "sequence": 16, "batch": 4, "lr": 0.01}),
}
NAMES = ("bf16", "fp32", "delayed", "current", "delayed:1")


@pytest.fixture(scope="module")
def text():
    return load_text(None, 64)


def make_run(name, text, config=CONFIGS["mlp"]):
    return Run(precision(name), config, text, torch.device("cpu"))


def masters(run):
    return run.optimizer.state_dict()["masters"]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_run_has_the_masters_and_the_batches_of_the_first(text, name, config):
    first, other = make_run("bf16", text, config), make_run(name, text, config)
    pairs = zip(masters(first), masters(other), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for _ in range(3):
        assert torch.equal(first.windows(16), other.windows(16))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_another_seed_is_another_start_and_another_order(text, config):
    first, second = make_run("bf16", text, config), make_run("bf16-2", text, config)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(masters(first), masters(second), strict=True))
    assert not torch.equal(first.windows(16), second.windows(16))
    next_seed = make_run("bf16", text, configure(**{**vars(config), "seed": 1}))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(masters(next_seed), masters(second), strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_run_learns(text, name, config):
    run = make_run(name, text, config)
    before = run.evaluate()
    for _ in range(20):
        run.step()
    assert run.evaluate() < before - 0.5
    assert run.result.nonfinite_values == 0


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fp8_runs_compute_otherwise_than_bf16(text, name, config):
    assert make_run(name, text, config).evaluate() != make_run("bf16", text, config).evaluate()


@pytest.mark.parametrize("model", CONFIGS)
def test_a_run_with_one_layer_in_fp8_has_scaling_state_in_the_middle_layer_alone(text, model):
    config = configure(**{**vars(CONFIGS[model]), "layers": 3})
    run = make_run("delayed:1", text, config)
    run.step()
    in_fp8 = {name.split(".")[1] for name, m in run.model.named_modules() if getattr(m, "fp8_initialized", False)}
    assert in_fp8 == {"1"}


def test_the_loss_of_fp32_is_that_of_plain_torch(text):
    run = make_run("fp32", text)
    windows = run.windows(16)
    model, plain = run.model, torch.nn.functional
    hidden = plain.linear(model.embedding(windows[:, :-1].long()).flatten(1), model.entry.weight, model.entry.bias)
    block = model.layers[0]
    normed = plain.layer_norm(hidden, (32,), block.norm.weight, block.norm.bias)
    widened = plain.gelu(plain.linear(normed, block.widen.weight, block.widen.bias), approximate="tanh")
    hidden = hidden + plain.linear(widened, block.narrow.weight, block.narrow.bias)
    logits = model.head(plain.layer_norm(hidden, (32,), model.norm.weight, model.norm.bias))
    expected = plain.cross_entropy(logits, windows[:, -1].long())
    torch.testing.assert_close(run.loss(windows), expected, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_then_falls_to_a_twentieth():
    config = configure("mlp", steps=400, lr=1.0)
    rates = [learning_rate(step, config) for step in range(400)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates.index(max(rates)) in range(18, 21)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)


def test_held_out_loss_is_taken_ten_times_and_at_the_end(text):
    run = make_run("fp32", text, configure("mlp", steps=25, width=32, layers=1, batch=8))
    taken = []
    for step in range(1, 26):
        run.step()
        taken += [step] if run.evaluation_is_due else []
    assert taken == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25]


@pytest.mark.parametrize("name", ["bf16", "delayed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_watched_run_has_the_numbers_of_one_that_is_not(text, name, config):
    results, states = [], []
    for watched in (False, True):
        run = make_run(name, text, config)
        if watched:
            run.watch()
        for _ in range(4):
            run.step()
            run.evaluate()
        results.append((run.result.loss, run.result.held_out))
        states.append([value.clone() for value in run.model.state_dict().values()])
    assert results[0] == results[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*states, strict=True))


def test_what_was_observed_goes_on_across_a_checkpoint(text):
    straight, stopped = make_run("delayed", text), make_run("delayed", text)
    straight.watch()
    stopped.watch()
    for _ in range(6):
        straight.step()
    for _ in range(3):
        stopped.step()
    resumed = make_run("delayed", text)
    resumed.load_state_dict(stopped.state_dict())
    resumed.watch()
    for _ in range(3):
        resumed.step()
    for run in (straight, resumed):
        run.state_dict()
    assert straight.result.observed["steps"] == [1, 2, 3, 4, 5, 6]
    assert resumed.result.observed == straight.result.observed


def test_no_byte_of_the_gpt_sees_those_after_it(text):
    run = make_run("fp32", text, CONFIGS["gpt"])
    windows = run.windows(3)[:, :-1].long()
    changed = windows.clone()
    changed[:, 9:] = 32
    before, after = run.model(windows), run.model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])
    assert before.shape == (3, 16, 256)


def test_the_layers_of_the_gpt_are_te_hal_s_own(text):
    layers = make_run("bf16", text, CONFIGS["gpt"]).model.layers
    assert all(isinstance(layer, te.TransformerLayer) for layer in layers)
