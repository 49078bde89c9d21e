"""te_hal.monitor around a training loop: it changes nothing, and says what happened by module, role and step."""

import copy
import json
import pickle

import pytest
import torch
from torch.nn.functional import gelu

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError

RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "bf16": lambda: None,
}


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.norm = te.LayerNorm(32)
        self.widen = te.Linear(32, 64, **options)
        self.narrow = te.Linear(64, 32, **options)

    def forward(self, x):
        return self.narrow(gelu(self.widen(self.norm(x))))


def train(model, chosen, steps, *, watch=None, microbatches=1):
    """Losses; the monitor's step comes between backward and optimizer."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        for _ in range(microbatches):
            x = torch.randn(16, 32, generator=generator)
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                loss = (model(x) - x).square().mean()
            loss.backward()
            losses.append(loss.item())
        if watch is not None:
            watch.step()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state(model):
    """All bytes of weights and scaling state."""
    return {
        name: bytes(value.detach().contiguous().view(torch.uint8).numpy().ravel())
        for name, value in model.state_dict().items()
        if value.numel()
    }


@pytest.mark.parametrize("mode", ["ignore", "report", "raise"])
@pytest.mark.parametrize("name", RECIPES)
def test_observing_changes_no_byte(name, mode):
    plain, watched = Model(), Model()
    expected = train(plain, RECIPES[name](), 6)
    with te_hal.monitor(watched, every=2, nonfinite=mode) as watch:
        found = train(watched, RECIPES[name](), 6, watch=watch)
    assert found == expected
    assert state(watched) == state(plain)


def tensors(watch):
    return {(entry["module"], entry["role"]): entry for entry in watch.history()["tensors"]}


@pytest.mark.parametrize("name", RECIPES)
def test_the_history_has_every_role_of_every_layer_at_the_first_and_each_nth_step(name):
    model = Model()
    with te_hal.monitor(model, every=3) as watch:
        train(model, RECIPES[name](), 7, watch=watch)
    history = watch.history()
    assert json.loads(json.dumps(history)) == history
    assert (history["steps"], len(history["gradient_norm"]), history["nonfinite"]) == ([1, 3, 6], 3, None)
    seen = tensors(watch)
    roles = ("input", "weight", "output", "grad_output")
    assert sorted(seen) == sorted((module, role) for module in ("widen", "narrow") for role in roles)
    for (_, role), entry in seen.items():
        assert entry["steps"] == [1, 3, 6]
        assert all(amax > 0 for amax in entry["amax"])
        quantized = name != "bf16" and role != "output"
        for column in ("scale", "clipped", "flushed"):
            assert [number is not None for number in entry[column]] == [quantized] * 3


def test_the_numbers_of_delayed_scaling_are_those_of_its_state():
    model, chosen = Model(), RECIPES["delayed"]()
    with te_hal.monitor(model, every=1) as watch:
        train(model, chosen, 5, watch=watch)
        scales = {key: model.widen.fp8_meta[key].scale.tolist() for key in ("scaling_fwd", "scaling_bwd")}
        histories = {key: model.widen.fp8_meta[key].amax_history for key in ("scaling_fwd", "scaling_bwd")}
        train(model, chosen, 1, watch=watch)
    seen = tensors(watch)
    for role, key, slot in (
        ("input", "scaling_fwd", 0),
        ("weight", "scaling_fwd", 1),
        ("grad_output", "scaling_bwd", 0),
    ):
        entry = seen["widen", role]
        assert entry["scale"][-1] == scales[key][slot]
        assert entry["amax"][-3:] == pytest.approx(histories[key][-3:, slot].tolist())


def test_the_gradient_norm_is_that_of_all_parameters():
    model = Model()
    with te_hal.monitor(model) as watch:
        model(torch.randn(8, 32)).square().sum().backward()
        watch.step()
    expected = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
    assert watch.history()["gradient_norm"] == [pytest.approx(expected, rel=1e-6)]


def test_sparse_gradients_count_each_row_once():
    model = torch.nn.Embedding(8, 4, sparse=True)
    with te_hal.monitor(model) as watch:
        model(torch.tensor([1, 1, 5])).sum().backward()
        watch.step()
    assert watch.history()["gradient_norm"] == [pytest.approx((4 * 2**2 + 4 * 1**2) ** 0.5)]


def test_a_gradient_in_main_grad_counts():
    layer = te.Linear(32, 16, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(16, 32)
    with te_hal.monitor(layer) as watch:
        layer(torch.randn(8, 32)).sum().backward()
        watch.step()
    assert watch.history()["gradient_norm"] == [pytest.approx(layer.weight.main_grad.norm().item(), rel=1e-6)]


def test_microbatches_of_a_step_are_one_column():
    model = Model()
    with te_hal.monitor(model, every=1) as watch:
        train(model, RECIPES["delayed"](), 2, watch=watch, microbatches=3)
    assert all(entry["steps"] == [1, 2] for entry in tensors(watch).values())


def test_an_optimizer_can_count_the_steps():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with te_hal.monitor(model, every=2, optimizer=optimizer) as watch:
        for _ in range(4):
            model(torch.randn(8, 32)).sum().backward()
            optimizer.step()
    optimizer.step()
    assert watch.history()["steps"] == [1, 2, 4]


def test_a_training_that_goes_on_counts_from_where_it_was():
    model = Model()
    with te_hal.monitor(model, every=5, steps_done=7) as watch:
        train(model, None, 4, watch=watch)
    assert watch.history()["steps"] == [10]


def test_an_evaluation_in_eval_mode_is_left_out():
    model = Model()
    with te_hal.monitor(model, every=1) as watch:
        train(model, RECIPES["delayed"](), 1, watch=watch)
        model.eval()
        with torch.no_grad(), te.autocast():
            model(1e6 * torch.randn(8, 32))
        model.train()
        train(model, RECIPES["delayed"](), 1, watch=watch)
    assert max(tensors(watch)["widen", "input"]["amax"]) < 10


def test_quantizers_made_anew_under_another_recipe_are_observed_too():
    model = Model()
    with te_hal.monitor(model, every=1) as watch:
        train(model, RECIPES["delayed"](), 2, watch=watch)
        train(model, RECIPES["current"](), 2, watch=watch)
        train(model, recipe.DelayedScaling(margin=1), 2, watch=watch)
    assert tensors(watch)["widen", "grad_output"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_a_quantized_output_is_a_role_of_its_own():
    first, second = te.Linear(32, 32), te.Linear(32, 32)
    model = torch.nn.Sequential(first, second)
    with te_hal.monitor(model, every=1) as watch:
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            second(first(torch.randn(8, 32), fp8_output=True), fp8_grad=True).sum().backward()
        watch.step()
    seen = tensors(watch)
    assert seen["0", "output"]["scale"][0] > 0
    assert seen["1", "grad_input"]["scale"][0] > 0
    assert ("1", "input") not in seen  # came quantized: nothing was quantized there


def test_after_close_nothing_is_recorded_and_another_monitor_may_come():
    model = Model()
    first = te_hal.monitor(model, every=1)
    with pytest.raises(StateError, match="observed already"):
        te_hal.monitor(model)
    train(model, RECIPES["current"](), 1, watch=first)
    before = first.history()
    first.close()
    first.close()
    with te_hal.monitor(model, every=1) as second:
        train(model, RECIPES["current"](), 1, watch=second)
    assert first.history() == before
    assert second.history()["steps"] == [1]
    with pytest.raises(StateError, match="closed"):
        first.step()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_history_given_out_is_a_copy():
    model = Model()
    with te_hal.monitor(model) as watch:
        train(model, None, 1, watch=watch)
    history = watch.history()
    history["steps"].append(99)
    history["tensors"][0]["amax"].clear()
    assert watch.history() != history


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_of_a_watched_model_is_not_watched(clone):
    model = Model()
    with te_hal.monitor(model, every=1) as watch:
        train(model, RECIPES["delayed"](), 1, watch=watch)
        other = clone(model)
        train(other, RECIPES["delayed"](), 1)
        watch.step()
    assert tensors(watch)["widen", "input"]["steps"] == [1]
    with te_hal.monitor(other, every=1) as watch:
        train(other, RECIPES["delayed"](), 1, watch=watch)
    assert tensors(watch)["widen", "grad_output"]["steps"] == [1]


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"every": 0}, ArgumentError, "every: got 0"),
        ({"every": 2.5}, ArgumentError, "every: got 2.5"),
        ({"every": True}, ArgumentError, "every: got True"),
        ({"steps_done": -1}, ArgumentError, "steps_done: got -1"),
        ({"nonfinite": "stop"}, ArgumentError, "nonfinite: got 'stop'; accepted: 'ignore', 'report', 'raise'"),
        ({"model": "a name"}, ArgumentTypeError, "model: got a str"),
        ({"optimizer": 3}, ArgumentTypeError, "optimizer: got a int"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_by_name_and_nothing_is_watched(arguments, error, names):
    model = Model()
    with pytest.raises(error, match=names):
        te_hal.monitor(**{"model": model, **arguments})
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_the_products_of_an_mlp_are_told_apart_and_what_fused_ops_cast_is_seen_by_its_codes(name):
    model = torch.nn.Sequential(te.LayerNormLinear(32, 32), te.LayerNormMLP(32, 64))
    with te_hal.monitor(model, every=1) as watch:
        for _ in range(2):
            with te.autocast(recipe=RECIPES[name]()):
                model(torch.randn(16, 32)).square().sum().backward()
            watch.step()
    seen = tensors(watch)
    places = {(module, role) for module, role in seen if role in ("input", "weight", "grad_output")}
    assert places == {(m, role) for m in ("0", "1.fc1", "1.fc2") for role in ("input", "weight", "grad_output")}
    assert {place for place in places if seen[place]["basis"] == "codes"} >= {("0", "input"), ("1.fc1", "input")}
    for place in places:
        assert all(0 < amax < 100 for amax in seen[place]["amax"])
    # A norm's result has a magnitude of a few.
    assert seen["0", "input"]["amax"][1] == pytest.approx(3.5, abs=1.5)
