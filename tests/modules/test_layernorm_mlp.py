"""LayerNormMLP: against float64 without FP8; under FP8 against its parts, run one by one."""

from __future__ import annotations

import closeness
import pytest
import torch
from activation_reference import clamped_swiglu, in_plain_torch
from norm_reference import normalised
from torch.nn import functional

import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.schema.activation import ACTIVATIONS

RECIPES = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling}
H, F, ROWS = 32, 64, 16

#: norm(found - exact) / norm(exact) without FP8: fp32 sums; up to four roundings to bf16.
ERROR = {torch.float32: 3e-6, torch.bfloat16: 1e-2}

#: Activations with a jump in their slope: a value that rounds to the other side of it has another gradient.
KINKED = ("relu", "reglu")


def mlp(dtype: torch.dtype = torch.float32, **arguments) -> te.LayerNormMLP:
    """With parameters that are all different from what they start with."""
    module = te.LayerNormMLP(H, F, params_dtype=dtype, **arguments)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
            assert name.startswith(("layer_norm", "fc1", "fc2"))
    return module


def data(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (ROWS,)) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*rows, H, dtype=dtype), torch.randn(*rows, H, dtype=dtype)


def exact_step(module: te.LayerNormMLP, x: torch.Tensor, gy: torch.Tensor, function=None) -> dict[str, torch.Tensor]:
    wide = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    inp = x.detach().double().requires_grad_()
    gamma, beta = wide["layer_norm_weight"], wide.get("layer_norm_bias")
    normed = normalised(inp, gamma, beta, module.eps, zero_centered=module.zero_centered_gamma)
    inside = functional.linear(normed, wide["fc1_weight"], wide.get("fc1_bias"))
    activated = in_plain_torch(module.activation, inside) if function is None else function(*inside.chunk(2, -1))
    y = functional.linear(activated, wide["fc2_weight"], wide.get("fc2_bias"))
    y.backward(gy.double())
    return {"y": y.detach(), "normed": normed.detach(), "gx": inp.grad} | {k: v.grad for k, v in wide.items()}


def step(module: te.LayerNormMLP, x: torch.Tensor, gy: torch.Tensor, chosen=None) -> dict[str, torch.Tensor]:
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(inp)
    y.backward(gy)
    return {"y": y.detach(), "gx": inp.grad} | {k: v.grad for k, v in module.named_parameters()}


def agrees(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], error: float) -> bool:
    return all(
        value.shape == exact[key].shape and closeness.relative_error(value, exact[key]) <= error
        for key, value in found.items()
    )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_without_fp8_results_and_gradients_are_those_of_float64(dtype, activation, bias):
    module = mlp(dtype, activation=activation, bias=bias)
    found = step(module, *(made := data(dtype)))
    assert {value.dtype for value in found.values()} == {dtype}
    if dtype == torch.bfloat16 and activation in KINKED:
        found = {key: found[key] for key in ("y", "fc2_weight")}
    assert agrees(found, exact_step(module, *made), ERROR[dtype])


@pytest.mark.parametrize("arguments", [{"normalization": "RMSNorm"}, {"zero_centered_gamma": True}], ids=str)
@pytest.mark.parametrize("rows", [(2, 3), (2, 2, 4)], ids=str)
def test_norms_and_ranks_make_no_difference_to_that(rows, arguments):
    module = mlp(**arguments)
    assert agrees(step(module, *(made := data(rows=rows))), exact_step(module, *made), ERROR[torch.float32])


def test_parameters_of_an_activation_reach_it_forward_and_backward():
    given = {"limit": 0.5, "alpha": 2.0, "glu_linear_offset": 0.0}
    module = mlp(activation="clamped_swiglu", activation_params=given)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(a, b, 0.5, 2.0) - clamped_swiglu(a, torch.zeros_like(b), 0.5, 2.0)  # offset 0

    made = data()
    found = step(module, *made)
    assert agrees(found, exact_step(module, *made, function), 1e-5)
    for make in RECIPES.values():
        distance = closeness.relative_error(step(module, *made, make())["y"], found["y"])
        assert 0.005 < distance < 0.2


def parts(module: te.LayerNormMLP, x: torch.Tensor, gy: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """One step from a fresh state, op by op: what is cast, and what is rounded before, by the rules F1 to F3 and F5."""
    p = {key: value.detach() for key, value in module.named_parameters()}
    dtype, delayed, kind = x.dtype, name == "delayed", {"activation": module.activation}
    both = {"rowwise": True, "columnwise": False}

    def cast(values: torch.Tensor, format: torch.dtype, own: torch.Tensor | None = None) -> torch.Tensor:
        if delayed:
            return ops.quantize(values, torch.ones(1), amax=torch.zeros(1), dtype=format, **both)
        amax = ops.amax(values if own is None else own)
        limit = torch.finfo(format).max
        return ops.quantize(values.to(dtype), ops.compute_scale(amax, fp8_max=limit), dtype=format, **both)

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    norm = {"epsilon": module.eps, "out_dtype": torch.float32 if delayed else dtype}
    normed, mean, rstd = ops.layernorm_fwd(x, p["layer_norm_weight"], p["layer_norm_bias"], **norm)
    read1, w1, w2 = cast(normed, e4m3), cast(p["fc1_weight"], e4m3), cast(p["fc2_weight"], e4m3)
    inside = ops.gemm(read1, w1, bias=p["fc1_bias"], out_dtype=dtype)
    fp32 = ops.activation_fwd(inside, **kind, out_dtype=torch.float32)
    read2 = cast(fp32, e4m3) if delayed else cast(fp32.to(dtype), e4m3, own=fp32)
    found = {"y": ops.gemm(read2, w2, bias=p["fc2_bias"], out_dtype=dtype)}
    grad2 = cast(gy, e5m2)
    found |= {"fc2_bias": ops.bias_grad(gy), "fc2_weight": ops.gemm(grad2, read2, layout="wgrad", out_dtype=dtype)}
    product = ops.gemm(grad2, w2, layout="dgrad", out_dtype=dtype)
    back = ops.activation_bwd(product, inside, **kind, out_dtype=torch.float32 if delayed else dtype)
    grad1 = cast(back, e5m2)
    found["fc1_bias"] = ops.bias_grad(back, out_dtype=dtype)
    found["fc1_weight"] = ops.gemm(grad1, read1, layout="wgrad", out_dtype=dtype)
    product = ops.gemm(grad1, w1, layout="dgrad", out_dtype=dtype)
    gx, ggamma, gbeta = ops.layernorm_bwd(product, x, mean, rstd, p["layer_norm_weight"])
    return found | {"gx": gx, "layer_norm_weight": ggamma, "layer_norm_bias": gbeta}


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("name", RECIPES)
def test_under_fp8_it_is_its_parts_with_the_roundings_that_the_rules_name(name, activation):
    module = mlp(torch.bfloat16, activation=activation)
    x, gy = data(torch.bfloat16)
    found, expected = step(module, x, gy, RECIPES[name]()), parts(module, x, gy, name)
    assert found.keys() == expected.keys()
    for key in found:
        assert torch.equal(found[key], expected[key]), key


def test_a_bf16_gelu_takes_the_unrounded_sum_of_product_and_bias():
    module = mlp(torch.bfloat16)
    x, gy = data(torch.bfloat16)
    p = {key: value.detach() for key, value in module.named_parameters()}
    normed, mean, rstd = ops.layernorm_fwd(x, p["layer_norm_weight"], p["layer_norm_bias"], epsilon=module.eps)
    inside = ops.gemm(normed, p["fc1_weight"]).float() + p["fc1_bias"].float()  # F4
    activated = ops.activation_fwd(inside, activation="gelu", out_dtype=torch.bfloat16)
    back = ops.activation_bwd(ops.gemm(gy, p["fc2_weight"], layout="dgrad"), inside, activation="gelu")
    found = step(module, x, gy)
    assert torch.equal(found["y"], ops.gemm(activated, p["fc2_weight"], bias=p["fc2_bias"]))
    assert torch.equal(found["fc1_bias"], back.sum(0).bfloat16())
    gx = ops.layernorm_bwd(
        ops.gemm(back.bfloat16(), p["fc1_weight"], layout="dgrad"), x, mean, rstd, p["layer_norm_weight"]
    )[0]
    assert torch.equal(found["gx"], gx)


def test_scaling_state_has_the_slots_of_both_products():
    module, (x, gy) = mlp(), data()
    step(module, x, gy, RECIPES["delayed"]())
    forward, backward = (module.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))
    assert module.fp8_meta["num_gemms"] == 2
    assert forward.roles == ("input", "weight", "output") * 2
    assert backward.roles == ("grad_output", "grad_input") * 2
    newest = forward.amax_history[-1]
    assert (newest[[0, 1, 3, 4]] > 0).all()
    assert not newest[[2, 5]].any()
    assert newest[[1, 4]].tolist() == [module.fc1_weight.abs().max(), module.fc2_weight.abs().max()]
    assert backward.amax_history[-1, 2] == gy.abs().max()
    assert backward.amax_history[-1, 0] > 0


def test_scaling_state_goes_through_a_checkpoint():
    first, second = mlp(), mlp()
    x, gy = data()
    step(first, x, gy, RECIPES["delayed"]())
    second.load_state_dict(first.state_dict())
    a, b = (step(module, x, gy, RECIPES["delayed"]()) for module in (first, second))
    assert all(torch.equal(a[key], b[key]) for key in a)


#: What needs a gradient.
NEEDS = {
    "fc1_weight": ("fc1_weight",),
    "fc2_weight": ("fc2_weight",),
    "fc1_bias": ("fc1_bias",),
    "fc2_bias": ("fc2_bias",),
    "beta": ("layer_norm_bias",),
    "input": ("x",),
    "all_but_fc2": ("x", "layer_norm_weight", "fc1_weight", "fc1_bias"),
}


@pytest.mark.parametrize("name", ["plain", "current"])
@pytest.mark.parametrize("who", NEEDS)
def test_a_part_of_the_gradients_is_the_same_as_among_all(who, name):
    chosen = RECIPES[name]() if name != "plain" else None
    module, (x, gy) = mlp(), data()
    full = step(module, x, gy, chosen)
    full["x"] = full.pop("gx")
    module.zero_grad()
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in NEEDS[who])
    inp = x.clone().requires_grad_("x" in NEEDS[who])
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(inp)
    y.backward(gy)
    found = {"x": inp.grad} | {key: parameter.grad for key, parameter in module.named_parameters()}
    assert {key for key, value in found.items() if value is not None} == set(NEEDS[who])
    assert all(torch.equal(found[key], full[key]) for key in NEEDS[who])


def test_the_bias_alone_under_delayed_scaling_gets_its_gradient():
    module, (x, gy) = mlp(), data()
    exact = exact_step(module, x, gy)["fc1_bias"]
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key == "fc1_bias")
    with te.autocast(recipe=RECIPES["delayed"]()):
        y = module(x)
    y.backward(gy)
    # Casts to 3 and 2 bits of significand before the sum over rows, 0.03 and 0.06 each in norm.
    assert closeness.relative_error(module.fc1_bias.grad, exact) <= 0.1


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_return_arguments_hand_out_bias_and_norm_in_this_order(name):
    chosen = RECIPES[name]() if name != "plain" else None
    module, (x, gy) = mlp(return_bias=True, return_layernorm_output=True), data()
    inp = x.clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y, bias, normed = module(inp)
    assert bias is module.fc2_bias
    exact = exact_step(module, x, gy)
    # fp32's roundings; or those of five FP8 casts between input and its gradient.
    error = 3e-6 if name == "plain" else 0.2
    assert closeness.relative_error(y + bias, exact["y"]) <= error
    assert closeness.relative_error(normed, exact["normed"]) <= 3e-6
    torch.autograd.backward([y, normed], [gy, torch.zeros_like(normed)])
    assert closeness.relative_error(inp.grad, exact["gx"]) <= error


@pytest.mark.parametrize("name", ["plain", "current"])  # delayed scaling's weight scale moves between steps
def test_microbatches_and_main_grad_give_what_they_give_without(name):
    def chosen() -> recipe.Recipe | None:
        return RECIPES[name]() if name != "plain" else None

    plain, fused = mlp(), mlp(fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    for weight in (fused.fc1_weight, fused.fc2_weight):
        weight.main_grad = torch.full_like(weight, 7.0)
    batches, recipes = [data(), data(), data()], (chosen(), chosen())
    for module, used, flags in ((plain, recipes[0], (None,) * 3), (fused, recipes[1], (True, False, False))):
        for (x, gy), flag in zip(batches, flags, strict=True):
            with te.autocast(enabled=used is not None, recipe=used):
                y = module(x, is_first_microbatch=flag)
            y.backward(gy)
    for key in ("fc1", "fc2"):
        assert getattr(fused, f"{key}_weight").grad is None
        main, wanted = getattr(fused, f"{key}_weight").main_grad, getattr(plain, f"{key}_weight").grad
        # Three fp32 gradients added up inside the gemm, or after it.
        assert closeness.relative_error(main, wanted) <= 1e-6
        assert torch.equal(getattr(fused, f"{key}_bias").grad, getattr(plain, f"{key}_bias").grad)


def test_calibrating_records_what_both_products_read():
    module, (x, gy) = mlp(), data()
    with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        module(x)
    exact = exact_step(module, x, gy)
    recorded = module.fp8_meta["scaling_fwd"].amax_history[0]
    weight, bias = module.fc1_weight.detach(), module.fc1_bias.detach()
    activated = in_plain_torch("gelu", functional.linear(exact["normed"], weight.double(), bias.double()))
    wanted = [tensor.abs().max().item() for tensor in (exact["normed"], weight, torch.zeros(1), activated)]
    assert recorded[:4].tolist() == pytest.approx(wanted, rel=1e-5)


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients():
    module = mlp()
    for chosen in (None, *(make() for make in RECIPES.values())):
        found = step(module, torch.empty(0, H), torch.empty(0, H), chosen)
        assert found["y"].shape == (0, H)
        assert not any(found[name].any() for name, _ in module.named_parameters())


@pytest.mark.parametrize("gated", [False, True])
def test_parameter_names_and_shapes_are_those_of_transformer_engine(gated):
    module = te.LayerNormMLP(H, F, activation="swiglu" if gated else "gelu")
    rows = 2 * F if gated else F
    assert [(k, tuple(v.shape)) for k, v in module.named_parameters()] == [
        ("layer_norm_weight", (H,)),
        ("layer_norm_bias", (H,)),
        ("fc1_weight", (rows, H)),
        ("fc1_bias", (rows,)),
        ("fc2_weight", (H, F)),
        ("fc2_bias", (H,)),
    ]
    assert [k for k, _ in te.LayerNormMLP(H, F, bias=False, normalization="RMSNorm").named_parameters()] == [
        *("layer_norm_weight", "fc1_weight", "fc2_weight")
    ]


def test_each_weight_is_filled_by_its_own_method():
    methods = {"init_method": lambda w: w.fill_(1.0), "output_layer_init_method": lambda w: w.fill_(2.0)}
    module = te.LayerNormMLP(H, F, **methods)
    assert module.fc1_weight.eq(1).all()
    assert module.fc2_weight.eq(2).all()


#: ffn_hidden_size, input shape, what the message must say.
REFUSED = {
    "ffn": (100, (8, 32), ["fc2_weight", "(32, 100)", "ffn_hidden_size, 100", "divisible by 16", "pad it to 112"]),
    "rows": (64, (9, 32), ["input", "(9, 32)", "leading sizes, 9", "divisible by 8", "pad it to 16"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_size_that_fp8_cannot_take_is_refused_naming_layer_operand_and_way_out(name):
    ffn, shape, said = REFUSED[name]
    module = te.LayerNormMLP(32, ffn, name="decoder.mlp")
    with pytest.raises(ValueError, match=r"LayerNormMLP 'decoder\.mlp'") as caught, te.autocast():
        module(torch.randn(shape))
    assert all(part in str(caught.value) for part in [*said, "te.autocast(enabled=False)"])
    assert module(torch.randn(shape)).shape == shape
