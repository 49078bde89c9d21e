"""Weights that live in FP8: recorded steps, bytes held, loading, moving, resuming."""

from __future__ import annotations

import copy
import gc
import io

import golden_values
import ml_dtypes
import numpy as np
import pytest
import torch
from quantized_layers import EVERY, RECIPES, quantized, run

import te_hal.modules as te
from te_hal import recipe
from te_hal.cli.memory import LiveBytes
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor

ALL = pytest.mark.parametrize("name", EVERY)
BOTH = pytest.mark.parametrize("name", RECIPES)


def plain(**arguments: object) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 64, **{"params_dtype": torch.bfloat16, **arguments})


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def test_four_recorded_steps_give_the_recorded_bytes():
    values = golden_values.load("training").case("fp8_params/current")
    chosen = recipe.Float8CurrentScaling()
    with te.quantized_model_init(recipe=chosen):
        module = te.Linear(
            64, 128, params_dtype=torch.bfloat16, init_method=lambda weight: weight.copy_(values["init"])
        )
    assert torch.equal(module.weight._data, values["weight_init/data"])
    assert torch.equal(module.weight._scale_inv, values["weight_init/scale_inv"])
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, weight_decay=0.01, master_weights=True)
    # Sums in another order, rounded to bf16: some results go to the other neighbour, 4e-3 away.
    for step in range(4):
        with te.autocast(recipe=chosen):
            y = module(values[f"step{step}/x"])
        y.backward(values[f"step{step}/g"])
        assert distance(y, values[f"step{step}/y"]) <= 1.5e-3
        assert distance(module.weight.grad, values[f"step{step}/wgrad"]) <= 1.5e-3
        module.weight.grad = values[f"step{step}/wgrad"].clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(module.weight._data, values[f"step{step}/weight/data"])
        scale_inv, recorded = (
            t.view(torch.int32) for t in (module.weight._scale_inv, values[f"step{step}/weight/scale_inv"])
        )
        assert (scale_inv - recorded).abs() <= 1
        assert distance(module.bias, values[f"step{step}/bias"]) <= 1e-3


@ALL
@pytest.mark.parametrize("cls", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_the_first_step_is_that_of_weights_quantized_at_each_step(cls, name):
    torch.manual_seed(0)
    ordinary, module = cls(32, 64, params_dtype=torch.bfloat16), quantized(name, cls=cls)
    for expected, found in zip(run(ordinary, name), run(module, name), strict=True):
        assert torch.equal(found, expected)
    for expected, found in zip(ordinary.parameters(), module.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_under_delayed_scaling_weights_start_with_scale_1_and_their_amax_recorded():
    module, weight = quantized("delayed"), plain().weight.detach()
    state = module.fp8_meta["scaling_fwd"]
    codes = weight.float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(module.weight._data.numpy(), codes)
    assert state.amax_history[0, 1] == weight.abs().max()
    run(module, "delayed")
    assert state.scale[1] == torch.tensor(448.0) / weight.abs().max().float()


@BOTH
def test_an_optimizer_step_requantizes_by_the_scale_of_the_recipe(name):
    module = quantized(name)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
    for seed in range(3):
        run(module, name, seed)
        optimizer.step()
        master = optimizer.state[module.weight]["master_param"]
        scale = np.float32(448) / master.abs().max().numpy()
        if name == "delayed":
            scale = module.fp8_meta["scaling_fwd"].scale[1].numpy()
        codes = (master.numpy() * scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(module.weight._data.numpy(), codes)
        assert module.weight._scale_inv.item() == np.float32(1) / scale


@BOTH
@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_loaded_weights_are_quantized_by_their_own_amax(name, factor):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).mul(0.023 * factor).bfloat16()
    module = quantized(name)
    run(module, name)
    module.load_state_dict({"weight": weight, "bias": torch.zeros(64)})
    scale = np.float32(448) / weight.abs().max().float().numpy()
    codes = (weight.float().numpy() * scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for seed in range(3):
        assert np.array_equal(module.weight._data.numpy(), codes)
        found = run(module, name, seed)[0]
        ordinary = plain()
        ordinary.load_state_dict({"weight": weight, "bias": torch.zeros(64)})
        expected = run(ordinary, "current", seed)[0]
        # Under delayed scaling the input's scale lags behind; the weight's does not.
        assert torch.equal(found, expected) if name == "current" else distance(found, expected) <= 0.05
    if name == "delayed":
        assert module.fp8_meta["scaling_fwd"].scale[1].item() == scale


@ALL
def test_a_saved_model_resumes_bit_for_bit(name):
    def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[torch.Tensor]:
        found = []
        for seed in seeds:
            found.append(run(module, name, seed)[0])
            optimizer.step()
            optimizer.zero_grad()
        return found

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = quantized(name)
        return module, te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)

    module, optimizer = made()
    train(module, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(module, optimizer, range(3, 6))
    other, second = made()
    file.seek(0)
    with torch.serialization.safe_globals([rebuild_quantized_tensor]):
        saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert all(map(torch.equal, train(other, second, range(3, 6)), expected))
    assert torch.equal(other.weight.dequantize(), module.weight.dequantize())
    assert torch.equal(other.get_extra_state(), module.get_extra_state())


@ALL
def test_loaded_weights_compute_what_weights_quantized_at_each_step_compute(name):
    module, ordinary = quantized(name), plain()
    run(module, name)
    weights = {"weight": torch.randn(64, 32).bfloat16() * 3, "bias": torch.zeros(64)}
    for each in (module, ordinary):
        each.load_state_dict(weights)
    if name == "delayed":  # there an ordinary weight's first scale is 1
        return
    assert torch.equal(run(module, name)[0], run(ordinary, name)[0])


def test_a_plain_weight_that_is_assigned_takes_the_place_of_the_quantized_one():
    module, weight = quantized(), torch.randn(64, 32).bfloat16()
    module.load_state_dict({"weight": weight, "bias": torch.zeros(64).bfloat16()}, assign=True)
    assert type(module.weight.data) is torch.Tensor
    with pytest.warns(UserWarning, match="has become plain"):
        run(module, "current")


# Bytes


def live_bytes(build: object) -> tuple[object, int, int]:
    with LiveBytes() as live:
        made = build()
        gc.collect()
    return made, live.now, live.peak


LAYERS, SIDE = 3, 1024
LAYER = 2 * SIDE * SIDE  # in bf16
#: Most bytes per weight, and of what rounding in fp32 takes at a time, in layers: pieces, whose size no layer changes.
SIZES = {"current": (recipe.Float8CurrentScaling, 1.05, 0.5), "nvfp4": (recipe.NVFP4BlockScaling, 0.6, 0.65)}


@pytest.mark.parametrize("name", SIZES)
def test_a_weight_takes_1_byte_an_element_or_0_6_and_its_making_little_more_than_one_layer(name):
    chosen, bound, working = SIZES[name]

    def model() -> torch.nn.Module:
        with te.quantized_model_init(recipe=chosen()):
            layers = [te.Linear(SIDE, SIDE, bias=False, params_dtype=torch.bfloat16) for _ in range(LAYERS)]
            return torch.nn.Sequential(*layers)

    made, now, peak = live_bytes(model)
    assert all(p._columnwise_data is None for p in made.parameters())
    assert now <= bound * LAYERS * SIDE * SIDE
    assert peak <= now + (1.01 + working) * LAYER


@pytest.mark.parametrize("name", SIZES)
def test_converting_layer_by_layer_takes_one_layer_more(name):
    chosen, bound, _ = SIZES[name]

    def convert() -> torch.nn.Module:
        model = torch.nn.Sequential(
            *(torch.nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
        )
        for number in range(LAYERS):
            with te.quantized_model_init(recipe=chosen()):
                layer = te.Linear(SIDE, SIDE, bias=False, params_dtype=torch.bfloat16, device="meta")
            layer.to_empty(device="cpu").load_state_dict(model[number].state_dict())
            model[number] = layer
        return model

    _, now, peak = live_bytes(convert)
    assert now <= bound * LAYERS * SIDE * SIDE
    assert peak <= (LAYERS + 1.01) * LAYER


def test_the_initial_value_is_preserved_exactly_until_it_is_cleared():
    module, weight = quantized(keep=True), plain().weight.detach()
    assert torch.equal(module.weight.get_high_precision_init_val(), weight)
    assert module.weight.get_high_precision_init_val().device.type == "cpu"
    twin = copy.deepcopy(module)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    assert torch.equal(twin.weight.get_high_precision_init_val(), weight)
    assert not hasattr(quantized().weight, "get_high_precision_init_val")


def test_each_group_keeps_an_initial_value_of_its_own():
    torch.manual_seed(0)
    plain_one = te.GroupedLinear(2, 32, 64, params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling(), preserve_high_precision_init_val=True):
        module = te.GroupedLinear(2, 32, 64, params_dtype=torch.bfloat16)
    for name in ("weight0", "weight1"):
        kept = module.get_parameter(name).get_high_precision_init_val()
        assert torch.equal(kept, plain_one.get_parameter(name).detach())
        module.get_parameter(name).clear_high_precision_init_val()
    assert "preserved value" not in te.memory_report(module).by_kind()


def test_a_master_may_start_from_the_preserved_value():
    module, weight = quantized(keep=True), plain().weight.detach()
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=0.0, master_weights=True)
    optimizer.initialize_state(module.weight)
    optimizer.set_scaled_state(module.weight, "master_param", module.weight.get_high_precision_init_val())
    run(module, "current")
    optimizer.step()
    assert torch.equal(optimizer.state[module.weight]["master_param"], weight.float())


# Moving and copying


@ALL
@pytest.mark.parametrize("how", ["bfloat16", "float", "half", "to cpu"])
def test_another_nominal_dtype_leaves_weights_quantized_and_their_values(name, how):
    module = quantized(name)
    before = [None if t is None else t.clone() for t in module.weight.quantized_storage.tensors()]
    module = module.to("cpu") if how == "to cpu" else getattr(module, how)()
    assert isinstance(module.weight, te.QuantizedTensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.dtype == {"float": torch.float32, "half": torch.float16}.get(how, torch.bfloat16)
    for found, expected in zip(module.weight.quantized_storage.tensors(), before, strict=True):
        assert found is expected is None or torch.equal(found, expected)
    if name == "nvfp4" and module.weight.dtype != torch.bfloat16:
        return  # its transform takes bf16 alone
    run(module, name)
    assert module.weight.grad.dtype == module.weight.dtype


def test_a_deep_copy_trains_apart():
    module = quantized("delayed")
    twin = copy.deepcopy(module)
    before = module.weight._data.clone()
    optimizer = te.optimizers.FusedAdam(twin.parameters(), lr=1e-2)
    run(twin, "delayed")
    optimizer.step()
    assert torch.equal(module.weight._data, before)
    assert not torch.equal(twin.weight._data, before)
    assert twin.weight._quantizer.scale.data_ptr() == twin.fp8_meta["scaling_fwd"].scale[1].data_ptr()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizers_of_torch_step_them_too(optimizer):
    module = quantized()
    before = module.weight.dequantize()
    steps = optimizer(module.parameters(), lr=1e-1)
    run(module, "current")
    steps.step()
    assert isinstance(module.weight, te.Float8Tensor)
    assert not torch.equal(module.weight.dequantize(), before)


@pytest.mark.parametrize("first", [None, True, False])
def test_a_first_microbatch_changes_nothing_and_keeps_nothing(first):
    module = quantized()
    expected = run(quantized(), "current")
    found = run(module, "current", is_first_microbatch=first)
    assert all(map(torch.equal, found, expected))
    assert not module._fp8_workspaces


def test_main_grad_gets_the_gradient():
    module, other = quantized(fuse_wgrad_accumulation=True), quantized()
    module.weight.main_grad = torch.zeros(64, 32)
    run(module, "current")
    run(other, "current")
    assert module.weight.grad is None
    # main_grad is fp32, the other gradient rounded to bf16.
    assert distance(module.weight.main_grad, other.weight.grad) <= 4e-3


def test_torch_autocast_decides_the_activation_dtype():
    module, other = quantized(params_dtype=torch.float32), quantized(params_dtype=torch.float32)
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=RECIPES["current"]()):
        y = module(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert module.weight.grad.dtype == torch.float32
    # Input and bias are rounded to bf16 before the cast, which sends some values to the other FP8 neighbour.
    assert distance(y, run_of(other, x)) <= 2e-2


def run_of(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with te.autocast(recipe=RECIPES["current"]()):
        return module(x).detach()


def test_outside_of_autocast_the_dequantized_weight_computes_with_a_warning():
    module = quantized(params_dtype=torch.float32)
    x = torch.randn(16, 32, requires_grad=True)
    with pytest.warns(UserWarning, match="FP8 weights outside of autocast"):
        y = module(x)
    expected = torch.nn.functional.linear(x, module.weight.dequantize(), module.bias)
    assert torch.allclose(y, expected, atol=1e-5)
    y.sum().backward()
    assert module.weight.grad.shape == (64, 32)


def test_new_scaling_state_is_what_the_weights_are_requantized_by():
    module = quantized("delayed")
    module.forget_scaling_state()
    run(module, "delayed")
    assert module.weight._quantizer.scale.data_ptr() == module.fp8_meta["scaling_fwd"].scale[1].data_ptr()
