"""te_hal.convert: models keep their numbers, their parameters and their calls, and the report says what happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from closeness import relative_error
from torch import nn

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.converting import Conversion
from te_hal.schema.errors import ArgumentError, ArgumentTypeError


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(make: Any, *arguments: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = make(*arguments, **settings)
    for parameter in made.parameters():  # also those that start at 0 or 1
        nn.init.normal_(parameter, std=0.3)
    return made


def assert_same_step(old: nn.Module, new: nn.Module, x: torch.Tensor, **flags: Any) -> None:
    """The result, and the gradients of the input and of every parameter, whatever its name is."""
    found = []
    for model in (old, new):
        leaf = x.clone().requires_grad_()
        y = model(leaf, **flags)
        y.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        found.append([y, leaf.grad, *sorted(grads, key=lambda g: (g.shape, g.norm()))])
    for own, other in zip(found[1], found[0], strict=True):
        assert relative_error(own, other) <= 1e-5


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.tied = nn.Linear(64, 32, bias=False)
        self.last = nn.RMSNorm(32, eps=1e-6)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.tied(self.norm(self.first(x))))
        return y + self.tied(self.again(y))


def test_linear_layers_and_norms_keep_numbers_parameters_and_names() -> None:
    old = build(Mixed)
    new = copy.deepcopy(old)
    before = dict(new.named_parameters())
    report = te_hal.convert(new)
    assert [type(m) for m in (new.first, new.norm, new.tied, new.last)] == [
        te.Linear,
        te.LayerNorm,
        te.Linear,
        te.RMSNorm,
    ]
    assert new.again is new.first
    assert dict(new.named_parameters()).keys() == before.keys()
    assert all(dict(new.named_parameters())[name] is parameter for name, parameter in before.items())
    assert [entry.name for entry in report.converted] == ["first", "norm", "tied", "last"]
    assert not report.left
    assert_same_step(old, new, draw(8, 32))
    assert old.state_dict().keys() <= new.state_dict().keys()
    new.load_state_dict(old.state_dict())


def test_weights_that_are_tied_to_another_module_stay_tied() -> None:
    model = build(nn.Sequential, nn.Embedding(48, 32), nn.Linear(32, 48, bias=False))
    model[1].weight = model[0].weight
    te_hal.convert(model)
    assert type(model[1]) is te.Linear
    assert model[1].weight is model[0].weight


def test_an_optimizer_made_before_goes_on() -> None:
    model = build(nn.Sequential, nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    te_hal.convert(model)
    before = model[0].weight.detach().clone()
    with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
        y = model(draw(16, 32))
    y.sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


SELF = {"query, key and value are one": (0, 0, 0), "another key": (0, 1, 1), "three of them": (0, 1, 2)}
MASKS: dict[str, dict[str, torch.Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5 + [True], [False] * 6])},
    "bool": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)},
    "added": {"attn_mask": draw(6, 6, seed=5)},
    "both": {
        "attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.tensor([[False] * 5 + [True], [False] * 6]),
    },
    "one per head": {"attn_mask": draw(8, 6, 6, seed=6) > 1.5},
}


@pytest.mark.parametrize("weights", [False, True], ids=["result", "weights too"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("which", SELF)
def test_attention_is_torchs(which: str, mask: str, batch_first: bool, weights: bool) -> None:
    old = build(nn.Sequential, nn.MultiheadAttention(32, 4, batch_first=batch_first))
    new = copy.deepcopy(old)
    te_hal.convert(new)
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in old.named_parameters()]
    shape = (2, 6, 32) if batch_first else (6, 2, 32)
    given = [draw(*shape, seed=seed) for seed in range(3)]
    found = []
    for attention in (old[0], new[0]):
        leaves = [x.clone().requires_grad_() for x in given]
        chosen = [leaves[index] for index in SELF[which]]
        y, seen = attention(*chosen, need_weights=weights, **MASKS[mask])
        y.square().sum().backward()
        grads = [p.grad for p in attention.parameters()] + [x.grad for x in leaves if x.grad is not None]
        found.append([y, *([seen] if seen is not None else []), *grads])
    assert len(found[0]) == len(found[1])
    for own, other in zip(found[1], found[0], strict=True):
        assert relative_error(own, other) <= 1e-5


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "padding"])
def test_an_encoder_layer_with_its_norms_first_becomes_one_layer(mask: str, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True, batch_first=batch_first)
    old = build(nn.TransformerEncoder, layer, 2, enable_nested_tensor=False)
    new = copy.deepcopy(old)
    report = te_hal.convert(new)
    assert [entry.after for entry in report.converted] == ["EncoderLayer"] * 2
    assert {id(p) for p in new.parameters()} != {id(p) for p in old.parameters()}
    masks = {
        "none": {},
        "bool": {"mask": MASKS["bool"]["attn_mask"]},
        "padding": {"src_key_padding_mask": MASKS["padding"]["key_padding_mask"]},
    }
    assert_same_step(old, new, draw(*((2, 6, 32) if batch_first else (6, 2, 32))), **masks[mask])


DIFFERENT = {
    "norms behind": ({}, "norms come after the sums"),
    "gelu": ({"norm_first": True, "activation": "gelu"}, "activation is no relu"),
    "dropout": ({"norm_first": True, "dropout": 0.1}, "drops out between its products"),
    "no bias": ({"norm_first": True, "bias": False}, "lacks a bias"),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_layer_that_computes_something_else_is_converted_by_parts(case: str, training: bool) -> None:
    settings, reason = DIFFERENT[case]
    settings = {"dropout": 0.0, "batch_first": True, **settings}
    layer = nn.TransformerEncoderLayer(32, 4, 64, **settings)
    nested = not layer.norm_first and "bias" not in settings and case != "gelu"
    old = build(nn.TransformerEncoder, layer, 1, enable_nested_tensor=nested).train(training)
    new = copy.deepcopy(old)
    report = te_hal.convert(new)
    kinds = [entry.after for entry in report.converted]
    assert kinds[:3] == ["MultiheadAttention", "Linear", "Linear"]
    assert reason in report.left[0].reason
    if training and settings["dropout"]:
        return
    with torch.set_grad_enabled(training):
        x = draw(2, 6, 32)
        padding = MASKS["padding"]["key_padding_mask"]
        found, expected = (model(x, src_key_padding_mask=padding)[:, :5] for model in (new, old))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_in_eval_the_parts_are_called_and_not_read_past() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = build(nn.TransformerEncoder, layer, 1).eval()
    te_hal.convert(model)
    seen = []
    for module in model.modules():
        if isinstance(module, te.Linear):
            module.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(draw(2, 6, 32), src_key_padding_mask=MASKS["padding"]["key_padding_mask"])
    assert len(seen) == 4


class Derived(nn.Linear):
    pass


def hooked() -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.register_forward_hook(lambda *_: None)
    return layer


STAY: dict[str, tuple[Any, str]] = {
    "derived": (lambda: Derived(32, 32), "derived from nn.Linear"),
    "hooks": (hooked, "hooks"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "derived from nn.Linear"),
    "fp64": (lambda: nn.Linear(32, 32, dtype=torch.float64), "float64"),
    "odd sizes": (lambda: nn.Linear(32, 10), "must be divisible by"),
    "no affine": (lambda: nn.LayerNorm(32, elementwise_affine=False), "weight and a bias"),
    "no bias": (lambda: nn.LayerNorm(32, bias=False), "weight and a bias"),
    "rms without weight": (lambda: nn.RMSNorm(32, elementwise_affine=False), "has a weight"),
    "other keys": (lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=16), "sizes of their own"),
    "a key of its own": (lambda: nn.MultiheadAttention(32, 4, add_zero_attn=True), "a key of its own"),
}


@pytest.mark.parametrize("case", STAY)
def test_what_has_no_counterpart_stays_and_the_report_says_why(case: str) -> None:
    make, reason = STAY[case]
    model = nn.Sequential(make(), nn.Linear(32, 32))
    kept = model[0]
    report = te_hal.convert(model)
    assert model[0] is kept
    assert report.left[0].name == "0"
    assert reason in report.left[0].reason
    assert [entry.name for entry in report.converted] == ["1"]
    assert "1 converted, 1 left" in str(report)


def test_a_filter_keeps_modules_and_their_parts() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 64))
    report = te_hal.convert(model, filter=lambda name, module: name == "0" and isinstance(module, nn.Linear))
    assert [entry.name for entry in report.converted] == ["0"]
    assert [(entry.name, entry.reason) for entry in report.left] == [("1", "the filter says so")]


def test_what_was_converted_is_left_alone_the_second_time() -> None:
    model = build(Mixed)
    te_hal.convert(model)
    assert te_hal.convert(model) == Conversion((), ())


def test_the_sizes_of_the_recipe_decide() -> None:
    model = nn.Sequential(nn.Linear(48, 48))
    assert te_hal.convert(model, recipe=recipe.MXFP8BlockScaling()).left[0].reason.startswith("out_features")
    assert te_hal.convert(model, recipe=recipe.DelayedScaling()).converted


def asks_the_name(name: str, module: nn.Module) -> Any:
    return name or module


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: te_hal.convert(nn.Linear(32, 32)), ArgumentError, "wrap it"),
        (lambda: te_hal.convert("model"), ArgumentTypeError, "nn.Module"),
        (lambda: te_hal.convert(nn.Sequential(), recipe="fp8"), ArgumentTypeError, "a recipe"),
        (lambda: te_hal.convert(nn.Sequential(), filter="all"), ArgumentTypeError, "callable"),
        (lambda: te_hal.convert(nn.Sequential(), filter=len), ArgumentTypeError, r"got a callable of \(obj, /\)"),
        (
            lambda: te_hal.convert(nn.Sequential(nn.Linear(2, 2)), filter=asks_the_name),
            ArgumentTypeError,
            "filter of '0': got",
        ),
        (
            lambda: te_hal.convert(nn.Sequential(), recipe=recipe.CustomRecipe(qfactory=print)),
            ArgumentError,
            "built-in",
        ),
    ],
    ids=["the layer itself", "no module", "no recipe", "no filter", "filter of one", "no answer", "a factory"],
)
def test_bad_input_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_parameters_are_moved_and_none_is_copied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True))
    before = {parameter.data_ptr() for parameter in model.parameters()}
    te_hal.convert(model)
    assert {parameter.data_ptr() for parameter in model.parameters()} == before


@pytest.mark.parametrize("chosen", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()], ids=["delayed", "current"])
def test_a_converted_model_runs_in_fp8(chosen: recipe.Recipe) -> None:
    layers = [
        nn.Linear(32, 32),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0),
        nn.LayerNorm(32),
        nn.Linear(32, 16),
    ]
    model = build(nn.Sequential, *layers)
    te_hal.convert(model, recipe=chosen)
    x = draw(8, 2, 32)
    plain = model(x)
    for _ in range(2):  # delayed scaling has its scales from the second step on
        with te.autocast(enabled=True, recipe=chosen):
            y = model(x)
        y.square().sum().backward()
    assert 1e-3 < relative_error(y, plain) < 0.2
    assert all(parameter.grad is not None for parameter in model.parameters())
