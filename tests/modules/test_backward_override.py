"""backward_override: a quantized forward, and a backward that multiplies plain tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import closeness
import pytest
import torch
from stub_backends import stub

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.dispatch import register_backend, registry
from te_hal.quantization import quantizer_factories
from te_hal.quantization.recipe_quantizers import make_quantizer
from te_hal.schema.errors import ArgumentError, UnsupportedError

RECIPES = {
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda **fields: recipe.CustomRecipe(qfactory=quantizer_factories.current_scaling_factory, **fields),
}
OVERRIDES = ("high_precision", "dequantized")
EVERY = pytest.mark.parametrize(("name", "override"), [(name, override) for name in RECIPES for override in OVERRIDES])
LAYERS = {
    "Linear": lambda: te.Linear(64, 96, params_dtype=torch.bfloat16),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96, params_dtype=torch.bfloat16),
}
FP32_ERROR = 1e-6


def made(layer: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[layer]()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(32, n, generator=generator).bfloat16() for n in (64, 96))
    return x, gradient


def step(module: torch.nn.Module, chosen: recipe.Recipe, **arguments: object) -> dict[str, torch.Tensor]:
    x, gradient = data()
    x.requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=chosen):
        y = module(x, **arguments)
    y.backward(gradient)
    grads = {key: value.grad for key, value in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def read_by_fprop(tensor: torch.Tensor, name: str, role: str, override: str) -> torch.Tensor:
    """What the backward multiplies, in float64."""
    if override == "high_precision":
        return tensor.double()
    quantizer = make_quantizer(RECIPES["current" if name == "custom" else name](), role)
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(tensor).dequantize().double()


def near(result: torch.Tensor, exact: torch.Tensor) -> bool:
    return closeness.roundings(result, exact, FP32_ERROR * exact.abs().max()) <= 1


@EVERY
def test_gradients_of_linear_are_products_of_plain_tensors(name, override):
    module, (x, gradient) = made("Linear"), data()
    found = step(module, RECIPES[name](backward_override=override))
    weight = read_by_fprop(module.weight.detach(), name, "weight", override)
    assert near(found["x"], gradient.double() @ weight)
    assert near(found["weight"], gradient.double().T @ read_by_fprop(x, name, "input", override))
    assert near(found["bias"], gradient.double().sum(0))


@pytest.mark.parametrize("layer", LAYERS)
@EVERY
def test_the_forward_has_the_bytes_that_it_has_without(name, override, layer):
    without, overridden = (step(made(layer), RECIPES[name](backward_override=value)) for value in (None, override))
    assert torch.equal(without["y"], overridden["y"])
    assert not torch.equal(without["x"], overridden["x"])


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_norm_before_the_product_hands_over_what_it_gave(override):
    module, (x, gradient) = made("LayerNormLinear"), data()
    found = step(module, recipe.Float8CurrentScaling(backward_override=override))
    normed = torch.nn.functional.layer_norm(x.float(), (64,), eps=module.eps).bfloat16()
    read = read_by_fprop(normed, "current", "input", override)
    error = (found["weight"].double() - gradient.double().T @ read).norm() / read.norm()
    assert error < 2e-3 * gradient.double().norm()
    assert near(found["bias"], gradient.double().sum(0))


@pytest.mark.parametrize(("override", "nbytes"), [("high_precision", 2.0), ("dequantized", 1.0)])
def test_what_is_kept_is_the_tensor_or_its_codes(override, nbytes):
    module, (x, _) = made("Linear"), data()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    chosen = recipe.Float8CurrentScaling(backward_override=override)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), te.autocast(recipe=chosen):
        module(x.requires_grad_())
    assert sum(saved.values()) == pytest.approx(nbytes * (x.numel() + module.weight.numel()), abs=8)


@pytest.mark.parametrize("override", OVERRIDES)
def test_weights_that_live_in_fp8_are_multiplied_as_what_they_stand_for(override):
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        module = te.Linear(64, 96, params_dtype=torch.bfloat16)
    found = step(module, recipe.Float8CurrentScaling(backward_override=override))
    _, gradient = data()
    assert near(found["x"], gradient.double() @ module.weight.dequantize().double())


@pytest.mark.parametrize("override", OVERRIDES)
def test_weights_that_live_in_mxfp8_need_no_second_copy(override):
    chosen = recipe.MXFP8BlockScaling(backward_override=override)
    with te.quantized_model_init(recipe=chosen):
        module = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16)
    assert te.memory_report(module).nbytes <= 1.05 * 256 * 512
    x = torch.randn(32, 256).bfloat16().requires_grad_()
    with te.autocast(recipe=chosen):
        module(x).sum().backward()
    weight = module.weight.dequantize().double()
    assert near(x.grad, torch.ones(32, 512, dtype=torch.float64) @ weight)


@pytest.mark.parametrize("override", OVERRIDES)
def test_main_grad_gets_the_same_product(override):
    plain = step(made("Linear"), recipe.Float8BlockScaling(backward_override=override))
    torch.manual_seed(0)
    module = te.Linear(64, 96, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.full((96, 64), 0.5)
    step(module, recipe.Float8BlockScaling(backward_override=override))
    assert torch.equal((module.weight.main_grad - 0.5).bfloat16(), plain["weight"])


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_quantized_input_and_gradient_are_taken(override):
    chosen = recipe.Float8CurrentScaling(backward_override=override, fp8_format=recipe.Format.E4M3)
    torch.manual_seed(0)
    first, second = te.Linear(64, 64), te.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=chosen):
        hidden = first(x, fp8_output=True)
        y = second(hidden, fp8_grad=True)
    y.sum().backward()
    ones, held = torch.ones(32, 64).double(), hidden.dequantize().double()
    weight = second.weight.detach()
    assert torch.allclose(second.weight.grad.double(), ones.T @ held, atol=1e-5)
    if override == "high_precision":
        assert torch.allclose(x.grad.double(), ones @ weight.double() @ first.weight.detach().double(), atol=1e-5)


#: Recipes whose forward and backward read different things.
TWOFOLD = {
    **{
        f"{name} {override}": RECIPES[name](backward_override=override)
        for name in ("current", "block", "mxfp8", "nvfp4")
        for override in OVERRIDES
    },
    "mxfp8 behind": recipe.CustomRecipe(qfactory=quantizer_factories.high_precision_fwd_mxfp8_bwd_factory),
    "nvfp4 behind": recipe.CustomRecipe(qfactory=quantizer_factories.mxfp8_fwd_nvfp4_bwd_factory),
    "mxfp8 ahead": recipe.CustomRecipe(qfactory=quantizer_factories.mxfp8_fwd_high_precision_bwd_factory),
}


@pytest.mark.parametrize("name", TWOFOLD)
def test_native_kernels_give_what_the_reference_gives(name):
    if "musa_emulator" not in [info.name for info in te_hal.list_backends() if info.usable]:
        pytest.skip("musa_emulator is not usable here")
    found = []
    for backend in ("cpu_reference", "musa_emulator"):
        with te_hal.use_backend(backend):
            found.append(step(made("LayerNormLinear"), TWOFOLD[name]))
    for key, reference in found[0].items():
        # Sums in another order: now and then the other neighbour in bf16.
        assert (found[1][key].double() - reference.double()).norm() <= 3e-4 * reference.double().norm(), key


def test_the_same_object_with_another_override_is_noticed():
    chosen, module = recipe.MXFP8BlockScaling(), made("Linear")
    before = step(module, chosen)
    chosen.backward_override = "high_precision"
    overridden = step(module, chosen)
    chosen.backward_override = None
    assert torch.equal(step(module, chosen)["x"], before["x"])
    assert not torch.equal(overridden["x"], before["x"])


def test_no_gradient_is_asked_of_a_factorys_delayed_state():
    chosen = recipe.CustomRecipe(
        qfactory=quantizer_factories.delayed_scaling_factory, backward_override="high_precision"
    )
    module = made("Linear")
    for _ in range(2):
        step(module, chosen)
    assert module.fp8_meta["scaling_bwd"].delayed is None
    assert module.fp8_meta["scaling_fwd"].delayed.amax_history[-1, 0] > 0


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_module_that_lacks_it_refuses_by_name_before_anything_changes(override):
    module = te.LayerNormMLP(64, 96)
    with (
        pytest.raises(UnsupportedError, match=rf"LayerNormMLP: backward_override: got '{override}'"),
        te.autocast(recipe=recipe.Float8CurrentScaling(backward_override=override)),
    ):
        module(torch.randn(32, 64))
    assert not module.fp8_initialized


@pytest.mark.parametrize("name", RECIPES)
def test_another_value_is_refused_by_the_fields_name(name):
    with pytest.raises(ArgumentError, match=r"\.backward_override: got 'bf16'") as raised:
        RECIPES[name](backward_override="bf16")
    assert raised.value.accepted == "None, 'high_precision', 'dequantized'"


def test_the_environment_gives_the_start_value_to_all_but_delayed_scaling():
    program = (
        "from te_hal import recipe as r; print(*(m().backward_override for m in (r.Float8CurrentScaling,"
        "r.Float8BlockScaling, r.MXFP8BlockScaling, r.NVFP4BlockScaling, r.DelayedScaling)))"
    )
    environment = {**os.environ, "TE_HAL_BACKWARD_OVERRIDE": "dequantized"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["dequantized"] * 4 + ["None"]


def test_a_forced_backend_that_decodes_nothing_is_refused_as_autocast_is_entered():
    reference = registry.tables().backends["cpu_reference"]
    kernels = {op: kernel for op, kernel in reference.kernels.items() if op != "dequantize"}
    register_backend(stub("decodes_nothing", kernels=kernels, supports=reference.supports))
    chosen = {override: recipe.Float8CurrentScaling(backward_override=override) for override in OVERRIDES}
    with te_hal.use_backend("decodes_nothing"):
        with pytest.raises(UnsupportedError, match=r"autocast: .*has no kernel for dequantize"):
            te.autocast(recipe=chosen["dequantized"]).__enter__()
        with te.autocast(recipe=chosen["high_precision"]), torch.no_grad():
            made("Linear")(data()[0])
        with torch.no_grad(), te.autocast(recipe=chosen["dequantized"]):
            made("Linear")(data()[0])
