"""Checkpoints: keys, foreign weights, formats without pickle, and runs that resume bit for bit."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
}

#: Those that a run is resumed under in a new process.


def delayed_inputs(role: te.QuantizerRole | None) -> object:
    """State for the inputs, the rest by current scaling."""
    if role is not None and role.tensor_type == "input":
        return te.DelayedScalingRequest(amax_history_len=4)
    return quantizer_factories.current_scaling_factory(role)


#: Every recipe, and weights that live in FP8 and FP4.
RESUMED = {
    "delayed": RECIPES["delayed"],
    "current": RECIPES["current"],
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=delayed_inputs),
    "delayed_weights": RECIPES["delayed"],
    "nvfp4_weights": recipe.NVFP4BlockScaling,
}

#: Module, torch's module of the same parameters, and Transformer Engine's keys.
PAIRS = {
    "Linear": (lambda: te.Linear(32, 32), lambda: torch.nn.Linear(32, 32), ["weight", "bias"]),
    "Linear_no_bias": (
        lambda: te.Linear(32, 32, bias=False),
        lambda: torch.nn.Linear(32, 32, bias=False),
        ["weight"],
    ),
    "LayerNorm": (lambda: te.LayerNorm(32), lambda: torch.nn.LayerNorm(32), ["weight", "bias"]),
    "RMSNorm": (lambda: te.RMSNorm(32), lambda: torch.nn.RMSNorm(32), ["weight"]),
}


def steps(module: torch.nn.Module, chosen, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    outputs = []
    for _ in range(count):
        x = torch.randn(16, 32, generator=generator, requires_grad=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.square().sum().backward()
        outputs.append(y.detach())
    return outputs


@pytest.mark.parametrize("name", PAIRS)
def test_keys_and_their_order_are_those_of_transformer_engine(name):
    make, _, keys = PAIRS[name]
    assert list(make().state_dict()) == [*keys, "_extra_state"]
    assert [key for key, _ in make().named_parameters()] == keys


def test_split_parameters_stand_one_by_one():
    module = te.Linear(32, 32, parameters_split={"query": 16, "key_": 16})
    keys = ["query_weight", "query_bias", "key_weight", "key_bias"]
    assert [key for key, _ in module.named_parameters()] == keys


@pytest.mark.parametrize("name", PAIRS)
def test_weights_of_the_torch_module_load_strictly(name):
    make, foreign, keys = PAIRS[name]
    source, module = foreign(), make()
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(source.state_dict(), strict=True)
    assert all(torch.equal(getattr(module, key), getattr(source, key)) for key in keys)
    nested = torch.nn.ModuleDict({"a": make(), "b": make()})
    nested.load_state_dict({f"{part}.{key}": value for part in "ab" for key, value in source.state_dict().items()})


@pytest.mark.parametrize("name", PAIRS)
def test_the_other_way_round_dropping_the_extra_keys_is_enough(name):
    make, foreign, _ = PAIRS[name]
    state = make().state_dict()
    with pytest.raises(RuntimeError, match="_extra_state"):
        foreign().load_state_dict(state)
    foreign().load_state_dict({key: value for key, value in state.items() if not key.endswith("_extra_state")})


def test_a_strict_load_still_reports_what_is_really_missing_or_unknown():
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"') as caught:
        te.Linear(32, 32).load_state_dict({"weight": torch.zeros(32, 32), "gamma": torch.zeros(1)})
    assert 'Unexpected key(s) in state_dict: "gamma"' in str(caught.value)
    assert "_extra_state" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chosen", RECIPES)
@pytest.mark.parametrize("name", PAIRS)
def test_extra_state_is_a_cpu_uint8_tensor_that_safe_formats_carry(name, chosen, dtype, tmp_path):
    module = PAIRS[name][0]().to(dtype)
    with te.autocast(enabled=chosen != "none", recipe=RECIPES[chosen]()):
        module(torch.randn(16, 32, dtype=dtype))
    state = module.state_dict()
    extra = state["_extra_state"]
    assert (type(extra), extra.dtype, extra.device.type) == (torch.Tensor, torch.uint8, "cpu")
    assert (extra.numel() > 0) == (name.startswith("Linear") and chosen == "delayed")
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for loaded in (
        safetensors.torch.load_file(tmp_path / "state.safetensors"),
        torch.load(buffer, weights_only=True),
    ):
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], state[key]) for key in state)
        PAIRS[name][0]().load_state_dict(loaded)


@pytest.mark.parametrize("chosen", RECIPES)
def test_a_loaded_module_goes_on_where_the_saved_one_stood(chosen):
    module, other = te.Linear(32, 32), te.Linear(32, 32)
    steps(module, RECIPES[chosen]())
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.get_extra_state(), module.get_extra_state())
    assert all(map(torch.equal, steps(module, RECIPES[chosen]()), steps(other, RECIPES[chosen]())))


def test_history_is_saved_also_while_another_recipe_is_in_use():
    module, other = te.Linear(32, 32), te.Linear(32, 32)
    steps(module, RECIPES["delayed"]())
    saved = module.get_extra_state()
    steps(module, RECIPES["current"](), 1)
    assert torch.equal(module.get_extra_state(), saved)
    other.load_state_dict(module.state_dict())
    expected, found = (steps(m, RECIPES["delayed"](), 1) for m in (module, other))
    assert torch.equal(expected[0], found[0])


@pytest.mark.parametrize("strict", [True, False])
def test_weights_from_elsewhere_start_scaling_state_anew(strict):
    module, fresh = te.Linear(32, 32), te.Linear(32, 32)
    steps(module, RECIPES["delayed"]())
    weights = {"weight": torch.randn(32, 32), "bias": torch.randn(32)}
    for target in (module, fresh):
        target.load_state_dict(weights, strict=strict)
        target.zero_grad()
    assert all(map(torch.equal, steps(module, RECIPES["delayed"]()), steps(fresh, RECIPES["delayed"]())))


def test_a_partial_load_of_other_modules_leaves_scaling_state_alone():
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    steps(model, RECIPES["delayed"]())
    kept, reset = (module.get_extra_state() for module in model)
    model.load_state_dict({"1.weight": torch.zeros(32, 32)}, strict=False)
    assert torch.equal(model[0].get_extra_state(), kept)
    assert not torch.equal(model[1].get_extra_state(), reset)
    assert model[1].get_extra_state().numel() == 0


def test_a_bias_alone_leaves_scaling_state_alone():
    module = te.Linear(32, 32)
    steps(module, RECIPES["delayed"]())
    kept = module.get_extra_state()
    module.load_state_dict({"bias": torch.ones(32)}, strict=False)
    assert torch.equal(module.bias, torch.ones(32))
    assert kept.numel() > 0
    assert torch.equal(module.get_extra_state(), kept)


def test_one_weight_of_several_starts_scaling_state_anew():
    module = te.Linear(32, 32, parameters_split=("query", "key"))
    steps(module, RECIPES["delayed"]())
    module.load_state_dict({"key_weight": torch.ones(16, 32)}, strict=False)
    assert module.get_extra_state().numel() == 0


def broken(state: torch.Tensor) -> dict[str, torch.Tensor]:
    altered = state.clone()
    altered[-1] ^= 1
    return {
        "cut_short": state[:-4],
        "header_only": state[:16],
        "altered": altered,
        "random": torch.arange(64, dtype=torch.uint8),
        "other_dtype": state.float(),
    }


@pytest.mark.parametrize("how", ["cut_short", "header_only", "altered", "random", "other_dtype"])
def test_a_damaged_state_is_refused_by_name_and_the_old_one_stays(how):
    module = te.Linear(32, 32, name="proj")
    steps(module, RECIPES["delayed"]())
    before = module.get_extra_state()
    damaged = {**module.state_dict(), "_extra_state": broken(before)[how]}
    with pytest.raises(RuntimeError, match="'proj': _extra_state"):
        module.load_state_dict(damaged)
    assert torch.equal(module.get_extra_state(), before)


def test_state_of_a_linear_layer_is_no_state_of_a_norm():
    module = te.Linear(32, 32)
    steps(module, RECIPES["delayed"]())
    with pytest.raises(RuntimeError, match=r"LayerNorm: _extra_state .*got scaling state"):
        te.LayerNorm(32).load_state_dict({**module.state_dict(), "weight": torch.ones(32)})


def test_state_follows_its_module_to_another_dtype_and_keeps_fp32():
    module = te.Linear(32, 32)
    steps(module, RECIPES["delayed"]())
    before = module.get_extra_state()
    module.bfloat16()
    assert torch.equal(module.get_extra_state(), before)
    assert module.fp8_meta["scaling_fwd"].scale.dtype == torch.float32


@pytest.mark.parametrize("chosen", RECIPES)
@pytest.mark.parametrize("name", PAIRS)
def test_saving_what_was_loaded_gives_the_same_bytes_and_its_size_stays(name, chosen):
    module, other = PAIRS[name][0](), PAIRS[name][0]()
    sizes = set()
    for count in range(1, 4):
        steps(module, RECIPES[chosen](), count)
        sizes.add(module.get_extra_state().numel())
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(module.state_dict(), first)
    other.load_state_dict(torch.load(io.BytesIO(first.getvalue()), weights_only=True))
    torch.save(other.state_dict(), second)
    assert first.getvalue() == second.getvalue()
    assert len(sizes) == 1


def train(name: str, start: int, stop: int, path: Path) -> list[str]:
    """Train from step to step, from a checkpoint unless it is the first; save, and return the losses."""
    torch.manual_seed(0)
    chosen, losses = RESUMED[name](), []
    quantized = name.endswith("_weights")
    with te.quantized_model_init(enabled=quantized, recipe=chosen if quantized else None):
        model = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 64), torch.nn.GELU(), te.Linear(64, 32))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=quantized)
    if start:
        saved = loaded(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])  # stochastic rounding draws its seeds there
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(64, 32, generator=generator), torch.randn(64, 32, generator=generator)
        with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=chosen):
            y = model(x)
        loss = (y.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(saved, path)
    return losses


def loaded(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([rebuild_quantized_tensor]):
        return torch.load(path, weights_only=True)


def train_in_a_new_process(start: int, stop: int, paths: dict[str, Path]) -> dict[str, list[str]]:
    program = (
        f"import runpy, torch, pathlib; torch.set_num_threads({torch.get_num_threads()})\n"
        f"train = runpy.run_path({__file__!r})['train']\n"
        f"for name, path in { ({name: str(path) for name, path in paths.items()})!r}.items():\n"
        f"    print(name, *train(name, {start}, {stop}, pathlib.Path(path)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}


def test_ten_steps_equal_five_and_five_more_in_a_new_process(tmp_path):
    names = list(RESUMED)
    halves = {name: tmp_path / f"{name}_half.pt" for name in names}
    straight = {name: train(name, 0, 10, tmp_path / f"{name}_straight.pt") for name in names}
    first = {name: train(name, 0, 5, halves[name]) for name in names}
    second = train_in_a_new_process(5, 10, halves)
    for name in names:
        assert len(set(straight[name])) == 10
        assert first[name] + second[name] == straight[name]
        whole, half = (loaded(tmp_path / f"{name}_{part}.pt") for part in ("straight", "half"))
        assert all(torch.equal(whole["model"][key], half["model"][key]) for key in whole["model"])
        keeps_state = name in ("delayed", "custom", "delayed_weights")
        assert (whole["model"]["1._extra_state"].numel() > 0) == keeps_state


def test_a_refused_extra_state_names_its_key_and_leaves_the_weights():
    def model():
        return torch.nn.Sequential(torch.nn.Sequential(te.Linear(32, 32)))

    trained, other = model(), model()
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        trained(torch.randn(8, 32))
    saved = trained.state_dict()
    saved["0.0._extra_state"] = saved["0.0._extra_state"][:-4]
    before = other[0][0].weight.clone()
    with pytest.raises(CheckpointError, match=r"key '0\.0\._extra_state'\): got bytes that do not match"):
        other.load_state_dict(saved)
    assert torch.equal(other[0][0].weight, before)
