"""Weights that live as what a CustomRecipe's factory makes of them (te_hal.modules.quantized_model_init)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from custom_recipes import BF16, E4M3, READY, Thousandths, by_role, equal
from hybrids import hybrid, parts

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.quantization.hybrid_tensor import rebuild_hybrid_tensor
from te_hal.quantization.identity_tensor import rebuild_identity_tensor
from te_hal.quantization.quantized_tensor import rebuild_quantized_tensor
from te_hal.schema.errors import ArgumentError, StateError, UnsupportedError

MIXED = {
    "mxfp8, nvfp4": factories.mxfp8_fwd_nvfp4_bwd_factory,
    "high precision, mxfp8": factories.high_precision_fwd_mxfp8_bwd_factory,
    "mxfp8, high precision": factories.mxfp8_fwd_high_precision_bwd_factory,
    "high precision": factories.high_precision_factory,
    "1x128, current": by_role(weight=lambda: hybrid(("1x128", "current"))),
    "a chain": by_role(weight=lambda: hybrid(("mxfp8", "nvfp4"), columnwise_source="rowwise_dequantized")),
    "a scale of the user's": by_role(weight=lambda: te.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3)),
}
MODULES = {
    "Linear": lambda: te.Linear(64, 96, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, params_dtype=BF16),
    "GroupedLinear": lambda: te.GroupedLinear(2, 64, 96, params_dtype=BF16),
}
REBUILDS = [rebuild_quantized_tensor, rebuild_hybrid_tensor, rebuild_identity_tensor]
EVERY = pytest.mark.parametrize("name", MIXED)


def custom(name: str) -> recipe.CustomRecipe:
    return recipe.CustomRecipe(qfactory=MIXED[name])


def with_state() -> recipe.CustomRecipe:
    """One whose factory asks for delayed scaling."""
    return recipe.CustomRecipe(qfactory=factories.delayed_scaling_factory)


def made(chosen: recipe.Recipe | None, module: str = "Linear", **arguments: object) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=chosen is not None, recipe=chosen, **arguments):
        return MODULES[module]()


def train(module: torch.nn.Module, chosen: recipe.Recipe, optimizer=None, steps: range = range(1)) -> list:
    found: list[torch.Tensor] = []
    for seed in steps:
        torch.manual_seed(seed)
        x = torch.randn(64, 64).to(BF16).requires_grad_()
        with te.autocast(recipe=chosen):
            y = module(x, [32, 32]) if isinstance(module, te.GroupedLinear) else module(x)
        y.backward(torch.randn(y.shape).to(BF16))
        found += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return found


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)


@pytest.mark.parametrize("name", READY)
def test_a_ready_factory_has_the_bytes_of_its_recipe_over_steps(name):
    factory, built_in = READY[name]
    found = []
    for chosen in (recipe.CustomRecipe(qfactory=factory), built_in()):
        module = made(chosen)
        found.append([*train(module, chosen, adam(module), range(3)), module.weight._rowwise_data])
    assert equal(*found)


@pytest.mark.parametrize("module", MODULES)
@EVERY
def test_the_first_step_is_that_of_weights_quantized_at_each_step(name, module):
    chosen = custom(name)
    held, ordinary = made(chosen, module), made(None, module)
    weights = [p for key, p in held.named_parameters() if "weight" in key and "norm" not in key]
    assert all(isinstance(weight, te.QuantizedTensor) for weight in weights)
    assert equal(train(held, chosen), train(ordinary, chosen))


@EVERY
def test_an_optimizers_step_quantizes_every_part_anew_from_the_master(name):
    chosen = custom(name)
    module = made(chosen)
    optimizer = adam(module)
    train(module, chosen, optimizer)
    state = next(iter(optimizer.state.values()))
    quantizer = MIXED[name](te.QuantizerRole("linear", "weight", ""))
    found, expected = (values_held(each.detach()) for each in (module.weight, quantizer(state["master_param"])))
    assert equal(found, expected)


def values_held(weight: te.QuantizedTensor) -> list[torch.Tensor]:
    held = parts(weight) if isinstance(weight, te.HybridQuantizedTensor) else [weight.dequantize()]
    return [values.to(BF16) for values in held]


@pytest.mark.parametrize("name", [*MIXED, "delayed"])
def test_a_saved_model_resumes_bit_for_bit(name):
    chosen = with_state() if name == "delayed" else custom(name)
    module = made(chosen)
    optimizer = adam(module)
    train(module, chosen, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(module, chosen, optimizer, range(2, 4))
    other = made(chosen)
    second = adam(other)
    file.seek(0)
    with torch.serialization.safe_globals(REBUILDS):
        saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    assert equal(train(other, chosen, second, range(2, 4)), expected)


@pytest.mark.parametrize("name", [*MIXED, "delayed"])
def test_saving_what_was_loaded_gives_the_same_state_and_bytes(name):
    chosen = with_state() if name == "delayed" else custom(name)
    module, other = made(chosen), made(chosen)
    train(module, chosen, adam(module), range(2))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.get_extra_state(), module.get_extra_state())
    found, expected = (tensors_held(each.weight) for each in (other, module))
    assert equal(found, expected)


def tensors_held(weight: te.QuantizedTensor) -> list[torch.Tensor]:
    return [buffer for buffer in weight.quantized_storage.tensors() if buffer is not None]


@EVERY
def test_a_deep_copy_trains_apart(name):
    chosen = custom(name)
    module = made(chosen)
    other = copy.deepcopy(module)
    before = module.weight.dequantize()
    train(other, chosen, adam(other))
    assert torch.equal(module.weight.dequantize(), before)
    assert not torch.equal(other.weight.dequantize(), before)


@EVERY
def test_a_model_made_on_the_meta_device_gets_its_values_later(name):
    chosen = custom(name)
    with te.quantized_model_init(recipe=chosen):
        module = te.Linear(64, 96, params_dtype=BF16, device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    assert equal(train(module, chosen), train(made(chosen), chosen))


@EVERY
def test_plain_weights_are_loaded_and_quantized(name):
    chosen = custom(name)
    module, ordinary = made(chosen), made(None)
    weights = {"weight": torch.randn(96, 64).bfloat16() * 3, "bias": torch.zeros(96)}
    for each in (module, ordinary):
        each.load_state_dict(weights)
    assert equal(train(module, chosen), train(ordinary, chosen))


def test_the_report_of_memory_counts_both_parts():
    module = made(custom("mxfp8, high precision"))
    entries = {entry.name: entry.nbytes for entry in te.memory_report(module).entries if "part" in entry.name}
    assert entries["weight (rowwise part): codes"] == 64 * 96
    assert entries["weight (columnwise part)"] == 2 * 64 * 96


def test_a_plain_python_quantizer_is_refused_by_its_class():
    with pytest.raises(UnsupportedError, match=r"Linear: weight: got a factory .* Thousandths"):
        made(recipe.CustomRecipe(qfactory=by_role(weight=Thousandths)))


def test_answers_that_cannot_serve_are_refused_before_there_is_a_module():
    with pytest.raises(ArgumentError, match=r"CustomRecipe\.qfactory"):
        made(recipe.CustomRecipe(qfactory=lambda _role: None))
    with pytest.raises(ArgumentError, match="weight"), te.quantized_model_init(recipe=custom("mxfp8, nvfp4")):
        te.Linear(48, 96)


@pytest.mark.parametrize("other", ["1x128, current", "high precision"])
def test_a_factory_of_other_formats_is_refused_and_the_weight_is_as_it_was(other):
    module = made(custom("mxfp8, nvfp4"))
    before, chosen = [part.clone() for part in parts(module.weight)], custom(other)
    with pytest.raises(StateError, match=r"Linear: weight: got hybrid\("):
        train(module, chosen)
    assert equal(parts(module.weight), before)
    module.weight.data = torch.zeros(96, 64)  # by the quantizer that made it
    assert not parts(module.weight)[0].any()


def test_a_built_in_recipe_is_refused():
    with pytest.raises(StateError, match="recipe mismatch"):
        train(made(custom("mxfp8, nvfp4")), recipe.MXFP8BlockScaling())


def test_a_weight_made_without_gradients_has_no_part_for_them():
    with torch.no_grad():
        module = made(custom("mxfp8, nvfp4"))
    chosen = custom("mxfp8, nvfp4")
    assert module.weight.get_usages() == {"rowwise": True, "columnwise": False}
    with torch.no_grad(), te.autocast(recipe=chosen):
        module(torch.randn(32, 64).to(BF16))
    with pytest.raises(UnsupportedError, match="rowwise part alone"):
        train(module, chosen)
