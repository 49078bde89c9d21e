"""Weights that live in FP8 and a state dict that does not fit: torch's own error, and no more changed than by torch."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}


def made(name: str) -> torch.nn.Sequential:
    with te.quantized_model_init(recipe=RECIPES[name]()):
        return torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (64,), (1, 64)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_of_another_shape_is_torchs_error_and_keeps_its_bytes(name, shape, strict):
    model, plain = made(name), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    kept = [buffer.clone() for buffer in model[1].weight.quantized_storage.tensors() if buffer is not None]
    state = {**plain.state_dict(), "1.weight": torch.randn(shape)}
    with pytest.raises(RuntimeError) as expected:
        plain.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight") as found:
        model.load_state_dict(state, strict=strict)
    assert str(found.value).splitlines()[1:] == str(expected.value).splitlines()[1:]
    held = [buffer for buffer in model[1].weight.quantized_storage.tensors() if buffer is not None]
    assert all(torch.equal(one, other) for one, other in zip(held, kept, strict=True))
    # As in torch, what fits has been loaded.
    assert torch.equal(model[1].bias, plain[1].bias)
    assert (model[0].weight.dequantize() - plain[0].weight).abs().max() <= 0.07 * plain[0].weight.abs().max()


EVERY = {**RECIPES, "block": recipe.Float8BlockScaling, "nvfp4": recipe.NVFP4BlockScaling}


def one(name: str, seed: int) -> te.Linear:
    torch.manual_seed(seed)
    with te.quantized_model_init(recipe=EVERY[name]()):
        return te.Linear(64, 96, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("into", EVERY)
@pytest.mark.parametrize("source", EVERY)
def test_codes_of_any_kind_load_into_weights_of_any_other(source, into):
    saved, module = one(source, 0), one(into, 1)
    module.load_state_dict(saved.state_dict())
    values, found = saved.weight.dequantize().double(), module.weight.dequantize().double()
    # Rounded once more: E4M3 costs 0.03, E2M1 0.12.
    bound = 0.0 if source == into else 0.13 if into == "nvfp4" else 0.04
    assert (found - values).norm() <= bound * values.norm()
    assert type(module.weight) is type(one(into, 2).weight)


@pytest.mark.parametrize("source", ["current", "mxfp8", "block", "nvfp4"])
def test_under_delayed_scaling_the_state_starts_from_the_amax_of_what_was_loaded(source):
    saved, module = one(source, 0), one("delayed", 1)
    module.load_state_dict(saved.state_dict())
    with te.autocast(recipe=recipe.DelayedScaling()):
        module(torch.randn(32, 64).bfloat16()).sum().backward()
    amax = saved.weight.dequantize().abs().max().float()
    assert module.fp8_meta["scaling_fwd"].scale[1] == torch.tensor(448.0) / amax
    before = module.weight.dequantize().double()
    torch.optim.SGD(module.parameters(), lr=0.0).step()  # quantizes anew what it does not change
    assert (module.weight.dequantize().double() - before).norm() <= 0.04 * before.norm()


def _assigned(model: torch.nn.Sequential) -> None:
    plain = torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    model.load_state_dict(plain.state_dict(), assign=True)


def _replaced(model: torch.nn.Sequential) -> None:
    for layer in model:
        layer.weight = torch.nn.Parameter(layer.weight.dequantize().detach())


@pytest.mark.parametrize("become_plain", [_assigned, _replaced], ids=["assigned", "replaced"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_that_have_become_plain_compute_as_plain_ones_and_say_so(name, become_plain):
    model = made(name)
    become_plain(model)
    twin = torch.nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    twin.load_state_dict({key: value for key, value in model.state_dict().items() if "extra" not in key})
    x = torch.randn(32, 64)
    told = pytest.warns(UserWarning, match=r"quantized_model_init made by \w+ has become plain.*fully_shard")
    with told, te.autocast(recipe=RECIPES[name]()):
        found = model(x)
    with te.autocast(recipe=RECIPES[name]()):
        expected = twin(x)
    assert (found - expected).norm() <= 0.1 * expected.norm()
