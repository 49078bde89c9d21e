"""te.ops.Sequential: neighbours that run as one give the bytes of the fused modules, and of the parts by the rules."""

from __future__ import annotations

import closeness
import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.quantization import quantizer_factories as factories

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "high_precision": lambda: recipe.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "a floor under amax": lambda: _with_floor(recipe.Float8CurrentScaling()),
    "factory": lambda: recipe.CustomRecipe(qfactory=factories.current_scaling_factory),
    "factory with state": lambda: recipe.CustomRecipe(qfactory=factories.delayed_scaling_factory),
    "two formats": lambda: recipe.CustomRecipe(qfactory=factories.mxfp8_fwd_high_precision_bwd_factory),
}
H, F, ROWS = 32, 64, 32
DTYPES = (torch.float32, torch.bfloat16)


def _with_floor(chosen):
    floor = recipe.QParams(amax_epsilon=8.0)
    chosen.fp8_quant_fwd_inp = chosen.fp8_quant_fwd_weight = chosen.fp8_quant_bwd_grad = floor
    return chosen


def steps(model, x, gy, chosen, *extra, count=2):
    """Outputs, gradients of inputs and parameters of some steps in a row, without an optimizer."""
    found = []
    for _ in range(count):
        model.zero_grad()
        inp = x.clone().requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = model(inp, *extra)
        y.backward(gy)
        found += [y.detach(), inp.grad, *(parameter.grad for parameter in model.parameters())]
    return found


def same_values(model, other):
    """Both get the same values, none of them what it started with."""
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.add_(torch.randn_like(mine) * 0.1)
            its.copy_(mine)
    return model, other


def equal(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def data(dtype, features=H):
    return torch.randn(ROWS, H, dtype=dtype), torch.randn(ROWS, features, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_linear_has_the_bytes_of_the_module(name, dtype, bias):
    op, module = same_values(
        te.ops.Linear(H, F, bias=bias, dtype=dtype), te.Linear(H, F, bias=bias, params_dtype=dtype)
    )
    made = data(dtype, F)
    assert equal(steps(op, *made, RECIPES[name]()), steps(module, *made, RECIPES[name]()))


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_norm_before_linear_has_the_bytes_of_layernorm_linear(name, dtype, norm):
    fused = te.ops.Sequential(getattr(te.ops, norm)(H, dtype=dtype), te.ops.Linear(H, F, dtype=dtype))
    fused, module = same_values(fused, te.LayerNormLinear(H, F, normalization=norm, params_dtype=dtype))
    made = data(dtype, F)
    assert equal(steps(fused, *made, RECIPES[name]()), steps(module, *made, RECIPES[name]()))


def mlp(dtype=torch.float32, activation="GELU"):
    inner = 2 * F if activation == "SwiGLU" else F
    return te.ops.Sequential(
        te.ops.LayerNorm(H, dtype=dtype),
        te.ops.Linear(H, inner, dtype=dtype),
        getattr(te.ops, activation)(),
        te.ops.Linear(F, H, dtype=dtype),
    )


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU", "SReLU"])
@pytest.mark.parametrize(
    "name", ["delayed", "current", "block", "mxfp8", "a floor under amax", "factory", "two formats"]
)
def test_norm_linear_activation_linear_has_the_bytes_of_layernorm_mlp_under_fp8(name, activation):
    dtype = torch.bfloat16
    fused, module = same_values(
        mlp(dtype, activation), te.LayerNormMLP(H, F, activation=activation.lower(), params_dtype=dtype)
    )
    made = data(dtype)
    assert equal(steps(fused, *made, RECIPES[name]()), steps(module, *made, RECIPES[name]()))


@pytest.mark.parametrize("name", ["none", "current"])
def test_fused_is_op_by_op_where_the_rules_round_in_between(name):
    """Current scaling reads the rounded result of a norm (F1)."""
    fused = te.ops.Sequential(te.ops.RMSNorm(H, dtype=torch.bfloat16), te.ops.Linear(H, F, dtype=torch.bfloat16))
    apart, fused = same_values(torch.nn.Sequential(*fused), te.ops.Sequential(*_copied(fused)))
    made = data(torch.bfloat16, F)
    assert equal(steps(fused, *made, RECIPES[name]()), steps(apart, *made, RECIPES[name]()))


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("name", ["none", "high_precision", "dequantized"])
def test_a_backward_that_multiplies_plain_tensors_reads_the_rounded_activation(name, activation):
    """F6: the activation is rounded before its cast; no gradient is cast."""
    dtype = torch.bfloat16
    fused, other = same_values(mlp(dtype, activation), mlp(dtype, activation))
    made, apart = data(dtype), torch.nn.Sequential(*other)
    assert equal(steps(fused, *made, RECIPES[name]()), steps(apart, *made, RECIPES[name]()))


def test_under_delayed_scaling_the_unrounded_norm_is_cast():
    """F1: op by op the norm's result is rounded first, so a few codes differ."""
    fused = te.ops.Sequential(te.ops.RMSNorm(H, dtype=torch.bfloat16), te.ops.Linear(H, F, dtype=torch.bfloat16))
    apart, fused = same_values(torch.nn.Sequential(*fused), te.ops.Sequential(*_copied(fused)))
    x, gy = torch.randn(256, H, dtype=torch.bfloat16), torch.randn(256, F, dtype=torch.bfloat16)
    found = [steps(model, x, gy, RECIPES["delayed"](), count=1)[0] for model in (fused, apart)]
    gamma = fused[0].weight.detach()
    normed, _ = ops.rmsnorm_fwd(x, gamma, epsilon=1e-5, out_dtype=torch.float32)
    cast = [
        ops.quantize(
            each, torch.ones(1), amax=torch.zeros(1), dtype=torch.float8_e4m3fn, rowwise=True, columnwise=False
        )
        for each in (normed, fused[1].weight.detach())
    ]
    by_rule = ops.gemm(*cast, bias=fused[1].bias.detach(), out_dtype=torch.bfloat16)
    assert torch.equal(found[0], by_rule)
    assert 0 < closeness.relative_error(found[1], found[0]) < 3e-2


def _copied(model):
    made = te.ops.Sequential(te.ops.RMSNorm(H, dtype=torch.bfloat16), te.ops.Linear(H, F, dtype=torch.bfloat16))
    made.load_state_dict(model.state_dict())
    return made


def test_an_activation_that_heads_a_chain_is_quantized_for_the_product_behind_it():
    op = te.ops.Sequential(te.ops.SwiGLU(), te.ops.BasicLinear(H, F, dtype=torch.bfloat16))
    x = torch.randn(ROWS, 2 * H, dtype=torch.bfloat16)
    gy = torch.randn(ROWS, F, dtype=torch.bfloat16)
    y, gx, gw = steps(op, x, gy, RECIPES["block"](), count=1)
    rounded = ops.activation_fwd(x, activation="swiglu")
    module = te.Linear(H, F, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(op[1].weight)
    wanted = steps(module, rounded, gy, RECIPES["block"](), count=1)
    assert equal([y, gw], [wanted[0], wanted[2]])
    assert torch.equal(gx, ops.activation_bwd(wanted[1], x, activation="swiglu"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("name", ["none", "current"])
def test_an_input_that_is_added_in_place_joins_the_sum_and_is_rounded_once(name, bias):
    dtype = torch.bfloat16
    model = te.ops.Sequential(te.ops.Linear(H, F, bias=bias, dtype=dtype), te.ops.AddExtraInput(in_place=True))
    if bias:
        torch.nn.init.normal_(model[0].bias)
    x, gy = data(dtype, F)
    residual = torch.randn(ROWS, F, dtype=dtype)
    module = te.Linear(H, F, bias=False, params_dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(model[0].weight)
    product, gx, gw = steps(module, x, gy, RECIPES[name](), count=1)
    wide = product.float() + (model[0].bias.detach().float() if bias else 0.0)
    wanted, memory = (residual.float() + wide).to(dtype), residual.clone()
    found = steps(model, x, gy, RECIPES[name](), memory, count=1)
    assert equal(found[:3], [wanted, gx, gw])
    assert torch.equal(memory, wanted)
    assert found[0].data_ptr() == memory.data_ptr()
    if bias:
        assert torch.equal(found[3], gy.float().sum(0).to(dtype))


def test_explain_tells_what_is_fused():
    model = mlp(torch.bfloat16)
    steps(model, *data(torch.bfloat16), RECIPES["delayed"](), count=1)
    told = te_hal.explain(model)
    by_name = {module.name: module for module in told.modules}
    calls = {name: {op.call.op for plan in module.plans for op in plan.ops} for name, module in by_name.items()}
    assert "layernorm_quantize" in calls["1.basic_ops.0"]
    assert {"activation_quantize", "activation_bwd_quantize", "bias_grad_quantize"} <= calls["3.basic_ops.0"]
    assert by_name["0"].joined == by_name["2"].joined == "runs with the BasicLinear behind it"
    assert "added by the BasicLinear before it" in str(told)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_kernels_that_fuse_give_what_the_composition_gives(name):
    if "musa_emulator" not in [info.name for info in te_hal.list_backends() if info.usable]:
        pytest.skip("musa_emulator is not usable here")
    fused, other = same_values(mlp(torch.bfloat16), mlp(torch.bfloat16))
    made = data(torch.bfloat16)
    with te_hal.use_backend("musa_emulator"):
        by_kernels = steps(fused, *made, RECIPES[name](), count=1)
        assert "layernorm_quantize" in str(te_hal.explain(fused))
    composed = steps(other, *made, RECIPES[name](), count=1)
    assert max(closeness.relative_error(a, b) for a, b in zip(by_kernels, composed, strict=True)) < 1e-2


def test_frozen_parts_run_only_what_gradients_ask_for():
    chosen = RECIPES["delayed"]
    for frozen in (
        ("1.basic_ops.0.weight",),
        ("0.weight", "0.bias", "1.basic_ops.0.weight", "1.basic_ops.1.bias"),
        ("3.basic_ops.0.weight",),
    ):
        torch.manual_seed(0)
        whole, part = same_values(mlp(torch.bfloat16), mlp(torch.bfloat16))
        x, gy = data(torch.bfloat16)
        for name in frozen:
            part.get_parameter(name).requires_grad_(requires_grad=False)
        found = []
        for model in (whole, part):
            with te.autocast(recipe=chosen()):
                y = model(x)
            y.backward(gy)
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert all(found[1][name] is None for name in frozen)
        assert all(torch.equal(grad, found[0][name]) for name, grad in found[1].items() if name not in frozen)


def test_an_op_with_a_hook_runs_by_itself_and_the_hook_runs():
    model, seen = mlp(), []
    model[2].register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].shape, output.shape)))
    x, gy = data(torch.float32)
    plain, hooked = same_values(mlp(), model)
    assert equal(steps(hooked, x, gy, None, count=1), steps(plain, x, gy, None, count=1))
    assert seen == [((ROWS, F), (ROWS, F))]
    linear_seen = []
    model[1].register_forward_hook(lambda *_: linear_seen.append(1))
    model(x)
    assert linear_seen == [1]


def test_a_quantized_input_is_read_as_it_is():
    chain = te.ops.Sequential(te.ops.Quantize(), te.ops.Linear(H, F), te.ops.Linear(F, H))
    alone = torch.nn.Sequential(te.ops.Linear(H, F), te.ops.Linear(F, H))
    same_values(chain, alone)
    made = data(torch.float32)
    found, wanted = (steps(model, *made, recipe.Float8CurrentScaling(), count=1) for model in (chain, alone))
    assert equal(found, wanted)
