"""What goes wrong on the way to a device or into FP8 is said clearly: which layer of which model, and what to do."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

MODULES = {
    "Linear": lambda **given: te.Linear(32, 32, **given),
    "LayerNormLinear": lambda **given: te.LayerNormLinear(32, 32, **given),
    "LayerNormMLP": lambda **given: te.LayerNormMLP(32, 64, **given),
    "TransformerLayer": lambda **given: te.TransformerLayer(32, 64, 4, **given),
    "MultiheadAttention": lambda **given: te.MultiheadAttention(32, 4, **given),
    "LayerNorm": lambda **given: te.LayerNorm(32, **given),
}
EVERY = pytest.mark.parametrize("name", MODULES)


class Model(torch.nn.Module):
    """Layers in a list, as models have them."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@EVERY
@pytest.mark.parametrize("moved", ["model", "input"])
def test_model_and_input_on_two_devices_are_refused_naming_both_and_the_way_out(name, moved):
    model = Model(MODULES[name](device="meta" if moved == "model" else "cpu"))
    x = torch.randn(8, 2, 32, device="cpu" if moved == "model" else "meta")
    with pytest.raises(ValueError, match=r"\(at layers\.0.* of Model\)") as caught:
        model(x)
    for part in ("meta", "cpu", "input on", "both on one device", ".to("):
        assert part in str(caught.value)


@EVERY
def test_under_fp8_too_and_nothing_has_changed_then(name):
    model = Model(MODULES[name]())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with te.autocast(), pytest.raises(ValueError, match="both on one device"):
        model(torch.randn(8, 2, 32, device="meta"))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_size_that_does_not_fit_names_the_layer_of_the_model():
    model = Model(te.Linear(32, 32), te.TransformerLayer(32, 64, 4), te.LayerNormMLP(32, 100))
    with (
        te.autocast(),
        pytest.raises(ValueError, match=r"LayerNormMLP: fc2_weight \(at layers\.2 of Model\): got .*100"),
    ):
        model(torch.randn(8, 2, 32))
    with te.autocast(), pytest.raises(ValueError, match=r"\(at layers\.0 of Model\): got shape \(7, 1, 32\) under FP8"):
        model(torch.randn(7, 1, 32))
    with te.autocast(), pytest.raises(ValueError, match=r"\(at self_attention\.layernorm_qkv of TransformerLayer\)"):
        model.layers[1](torch.randn(7, 1, 32))


def test_a_module_that_is_called_by_itself_has_no_place_to_name():
    with pytest.raises(ValueError, match=r"^Linear: input: got"), te.autocast():
        te.Linear(32, 32)(torch.randn(7, 32))


def test_an_error_with_a_place_survives_pickling():
    with pytest.raises(ValueError, match=r"\(at layers\.0 of Model\)") as caught:
        Model(te.Linear(32, 32))(torch.randn(8, 16))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_autocast_around_a_model_without_te_modules_warns_once():
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)), torch.randn(8, 32)

    def three_steps() -> None:
        for _ in range(3):
            with te.autocast():
                model(x)

    with pytest.warns(UserWarning, match=r"te\.autocast: no module of te_hal ran inside") as said:
        three_steps()
    assert len(said) == 1
    assert said[0].filename == __file__


def test_autocast_does_not_warn_where_a_module_ran_or_an_error_ended_it():
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32), te.Linear(32, 32)), torch.randn(8, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast():
            model(x)
        with te.autocast(), te.autocast(enabled=False):
            model(x)
        with te.autocast(enabled=False):
            torch.relu(x)
        with te.autocast():
            te.LayerNorm(32)(x)
        with pytest.raises(RuntimeError, match="stop"), te.autocast():
            raise RuntimeError("stop")


OTHERS = {
    "another_class": (recipe.DelayedScaling(), recipe.Float8CurrentScaling()),
    "another_field": (recipe.DelayedScaling(amax_history_len=4), recipe.DelayedScaling(amax_history_len=4, margin=1)),
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_recipe_entered_after_weights_were_kept_under_another_says_that_they_are_quantized_anew(name, change):
    first, second = OTHERS[change]
    module, other, x = MODULES[name](), MODULES[name](), torch.randn(8, 32)
    other.load_state_dict(module.state_dict())
    for each in (module, other):
        with te.autocast(recipe=first), torch.no_grad():
            each(x, is_first_microbatch=True if each is module else None)
    with te.autocast(recipe=second), torch.no_grad():
        with pytest.warns(
            UserWarning, match=rf"{name}: weights kept .*{type(first).__name__}.*{type(second).__name__}"
        ):
            found = module(x, is_first_microbatch=False)
        assert torch.equal(found, other(x))
