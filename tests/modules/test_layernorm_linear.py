"""LayerNormLinear: against float64 without FP8; under FP8 against its two halves and an emulation of the casts."""

from __future__ import annotations

import closeness
import pytest
import torch
from linear_emulation import E4M3, E5M2, array, cast, current_scale, largest_magnitude
from norm_reference import normalised

import te_hal.modules as te
from te_hal import recipe

RECIPES = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}

#: norm(found - exact) / norm(exact) for results and gradients without FP8: fp32 sums; two roundings to bf16.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def layer(norm: str = "LayerNorm", dtype: torch.dtype = torch.float32, **arguments) -> te.LayerNormLinear:
    """With parameters that are all different from what they start with."""
    module = te.LayerNormLinear(32, 48, normalization=norm, params_dtype=dtype, **arguments)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith("weight") or name.startswith("layer_norm"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def data(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (16,)) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*rows, 32, dtype=dtype, requires_grad=True), torch.randn(*rows, 48, dtype=dtype)


def exact_step(module: te.LayerNormLinear, x: torch.Tensor, gy: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    inp = x.detach().double().requires_grad_()
    normed = normalised(
        inp,
        wide["layer_norm_weight"],
        wide.get("layer_norm_bias"),
        module.eps,
        zero_centered=module.zero_centered_gamma,
    )
    y = torch.nn.functional.linear(normed, wide["weight"], wide.get("bias"))
    y.backward(gy.double())
    return {"y": y.detach(), "normed": normed.detach(), "gx": inp.grad} | {k: v.grad for k, v in wide.items()}


def step(module: te.LayerNormLinear, x: torch.Tensor, gy: torch.Tensor, chosen=None) -> dict[str, torch.Tensor]:
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        found = module(inp)
    y, *_ = found if isinstance(found, tuple) else (found,)
    y.backward(gy)
    return {"y": y.detach(), "gx": inp.grad} | {k: v.grad for k, v in module.named_parameters()}


@pytest.mark.parametrize("rows", [(16,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "zero_centered"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=list(NORMS))
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_without_fp8_results_and_gradients_are_those_of_float64(dtype, norm, zero_centered, bias, rows):
    module = layer(norm, dtype, zero_centered_gamma=zero_centered, bias=bias)
    x, gy = data(dtype, rows)
    found, exact = step(module, x, gy), exact_step(module, x, gy)
    assert {value.dtype for value in found.values()} == {dtype}
    for key, value in found.items():
        assert value.shape == exact[key].shape
        assert closeness.relative_error(value, exact[key]) <= ERROR[dtype], key


@pytest.mark.parametrize("norm", NORMS.values(), ids=list(NORMS))
def test_under_current_scaling_it_is_the_norm_followed_by_linear(norm):
    module, kind = layer(norm, torch.bfloat16), {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}[norm]
    before, after = kind(32, dtype=torch.bfloat16), te.Linear(32, 48, params_dtype=torch.bfloat16)
    before.weight, after.weight, after.bias = module.layer_norm_weight, module.weight, module.bias
    if norm == "LayerNorm":
        before.bias = module.layer_norm_bias
    x, gy = data(torch.bfloat16)
    found = step(module, x, gy, recipe.Float8CurrentScaling())
    module.zero_grad()
    x.grad = None
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = after(before(x))
    y.backward(gy)
    parts = {"y": y.detach(), "gx": x.grad} | {k: v.grad for k, v in module.named_parameters()}
    assert all(torch.equal(found[key], parts[key]) for key in parts)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("norm", NORMS.values(), ids=list(NORMS))
def test_with_the_norms_result_returned_it_is_the_norm_followed_by_linear(norm, name):
    module = layer(norm, torch.bfloat16, return_layernorm_output=True)
    after = te.Linear(32, 48, params_dtype=torch.bfloat16)
    after.weight, after.bias = module.weight, module.bias
    x, gy = data(torch.bfloat16)
    with te.autocast(recipe=RECIPES[name]()):
        y, normed = module(x)
    with te.autocast(recipe=RECIPES[name]()):
        expected = after(normed.detach())
    assert torch.equal(y, expected)
    assert closeness.relative_error(normed, exact_step(module, x, gy)["normed"]) <= ERROR[torch.bfloat16]


@pytest.mark.parametrize("name", RECIPES)
def test_the_casts_follow_the_norm_as_the_rules_of_fusion_say(name):
    module = layer("LayerNorm", torch.bfloat16)
    x, gy = data(torch.bfloat16)
    found = step(module, x, gy, RECIPES[name]())
    fp32 = normalised(x.detach().float(), module.layer_norm_weight.float(), module.layer_norm_bias.float(), module.eps)
    delayed = name == "delayed"
    read = array(fp32 if delayed else fp32.bfloat16())  # F1
    weight, grads = array(module.weight), array(gy)
    of_input = cast(read, 1 if delayed else current_scale(read, E4M3), E4M3)
    of_weight = cast(weight, 1 if delayed else current_scale(weight, E4M3), E4M3)
    of_grad = cast(grads, 1 if delayed else current_scale(grads, E5M2), E5M2)
    y = torch.from_numpy(of_input @ of_weight.T) + module.bias.double()
    # Operands are exact, so that what is left is one rounding to bf16, 2e-3 at most.
    assert closeness.relative_error(found["y"], y) <= 3e-3
    assert closeness.relative_error(found["weight"], torch.from_numpy(of_grad.T @ of_input)) <= 3e-3
    assert closeness.relative_error(found["bias"], gy.double().sum(0)) <= 3e-3
    # Against unquantized values: casts to 3 and 2 bits of significand, 0.03 and 0.06 each in norm.
    assert closeness.relative_error(found["gx"], exact_step(module, x, gy)["gx"]) <= 0.15
    if delayed:
        assert module.fp8_meta["scaling_fwd"].amax_history[-1, 0] == pytest.approx(
            float(largest_magnitude(array(fp32))), rel=1e-6
        )


def test_a_gradient_for_the_returned_norm_goes_through_it_too():
    module = layer(return_layernorm_output=True, return_bias=True)
    x, gy = data()
    y, bias, normed = module(x)
    assert bias is module.bias
    gn = torch.randn_like(normed)
    torch.autograd.backward([y, normed], [gy, gn])
    inp = x.detach().double().requires_grad_()
    gamma, beta = (p.detach().double().requires_grad_() for p in (module.layer_norm_weight, module.layer_norm_bias))
    exact = normalised(inp, gamma, beta, module.eps)
    torch.autograd.backward([exact @ module.weight.detach().double().T, exact], [gy.double(), gn.double()])
    assert closeness.relative_error(x.grad, inp.grad) <= ERROR[torch.float32]
    assert closeness.relative_error(module.layer_norm_weight.grad, gamma.grad) <= ERROR[torch.float32]
    assert closeness.relative_error(module.layer_norm_bias.grad, beta.grad) <= ERROR[torch.float32]


def test_a_write_to_the_returned_norm_is_noticed_where_it_was_kept():
    module = layer(return_layernorm_output=True)
    y, normed = module(data()[0])
    normed.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", RECIPES)
def test_an_output_may_leave_quantized_and_feed_linear(name):
    module = layer("LayerNorm", torch.bfloat16)
    with te.autocast(recipe=RECIPES[name]()):
        y = module(data(torch.bfloat16)[0], fp8_output=True)
        assert isinstance(y, te.Float8Tensor)
        te.Linear(48, 16, params_dtype=torch.bfloat16)(y).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


#: What needs a gradient; and which of the three products run.
NEEDS = {
    "all": (("x", "layer_norm_weight", "layer_norm_bias", "weight", "bias"), {"fprop", "dgrad", "wgrad"}),
    "weight": (("weight",), {"fprop", "wgrad"}),
    "gamma": (("layer_norm_weight",), {"fprop", "dgrad"}),
    "input": (("x",), {"fprop", "dgrad"}),
    "bias": (("bias",), {"fprop"}),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", NEEDS)
def test_only_what_gradients_ask_for_runs_and_they_are_the_same(name, fp8):
    chosen = recipe.Float8CurrentScaling() if fp8 else None
    module = layer()
    x, gy = data()
    full = step(module, x, gy, chosen)
    wanted, _ = NEEDS[name]
    module.zero_grad()
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in wanted)
    inp = x.detach().clone().requires_grad_("x" in wanted)
    with te.autocast(enabled=fp8, recipe=chosen):
        y = module(inp)
    y.backward(gy)
    found = {"x": inp.grad} | {key: parameter.grad for key, parameter in module.named_parameters()}
    assert {key for key, value in found.items() if value is not None} == set(wanted)
    full["x"] = full.pop("gx")
    assert all(torch.equal(found[key], full[key]) for key in wanted)


def test_split_parameters_act_as_one():
    whole, split = te.LayerNormLinear(32, 48), te.LayerNormLinear(32, 48, parameters_split={"query": 32, "key_": 16})
    assert [name for name, _ in split.named_parameters()] == [
        *("layer_norm_weight", "layer_norm_bias", "query_weight", "query_bias", "key_weight", "key_bias")
    ]
    with torch.no_grad():
        split.query_weight.copy_(whole.weight[:32])
        split.key_weight.copy_(whole.weight[32:])
    x, gy = data()
    assert torch.equal(step(whole, x, gy)["y"], step(split, x, gy)["y"])
    assert torch.equal(whole.weight.grad[32:], split.key_weight.grad)


@pytest.mark.parametrize("name", RECIPES)
def test_microbatches_give_what_they_give_without_the_argument(name):
    kept, anew = layer(), layer()
    anew.load_state_dict(kept.state_dict())
    x, gy = data()
    for module, flags in ((kept, (True, False, False)), (anew, (None, None, None))):
        with te.autocast(recipe=RECIPES[name]()):
            for flag in flags:
                module(x, is_first_microbatch=flag).backward(gy)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(kept.parameters(), anew.parameters(), strict=True))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_main_grad_takes_the_weight_gradient(fp8):
    plain, fused = layer(), layer(fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.weight.main_grad = torch.full((48, 32), 0.5)
    x, gy = data()
    chosen = recipe.Float8CurrentScaling() if fp8 else None
    wanted = step(plain, x, gy, chosen)["weight"]
    step(fused, x, gy, chosen)
    assert fused.weight.grad is None
    # Added up beside 0.5, whose neighbours in fp32 are 6e-8 apart.
    assert torch.allclose(fused.weight.main_grad, wanted + 0.5, rtol=0, atol=1e-5)


def test_calibrating_records_what_the_product_reads():
    module = layer()
    x, _ = data()
    with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        y = module(x)
    normed = normalised(x, module.layer_norm_weight, module.layer_norm_bias, module.eps).detach()
    recorded = module.fp8_meta["scaling_fwd"].amax_history[0]
    assert recorded[0] == pytest.approx(float(normed.abs().max()), rel=1e-6)
    assert recorded[1] == module.weight.abs().max()
    assert closeness.relative_error(y, exact_step(module, x, torch.zeros(16, 48))["y"]) <= ERROR[torch.float32]


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients():
    module = layer()
    for chosen in (None, recipe.Float8CurrentScaling(), recipe.DelayedScaling()):
        found = step(module, torch.empty(0, 32), torch.empty(0, 48), chosen)
        assert found["y"].shape == (0, 48)
        assert not any(found[name].any() for name, _ in module.named_parameters())


def test_weights_start_as_in_transformer_engine_and_under_the_trackers_fork():
    tracker = te.RNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    first = te.LayerNormLinear(512, 256, get_rng_state_tracker=lambda: tracker)
    assert abs(first.weight.std().item() - 0.023) < 0.001
    assert not first.bias.any()
    assert first.layer_norm_weight.eq(1).all()
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    torch.manual_seed(99)
    assert torch.equal(te.LayerNormLinear(512, 256, get_rng_state_tracker=lambda: tracker).weight, first.weight)
