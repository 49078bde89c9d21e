"""TransformerLayer: against plain torch in float64, and what its arguments do."""

from __future__ import annotations

import io

import closeness
import pytest
import torch
from exact_layer import Exact

import te_hal.modules as te
from te_hal import recipe

RECIPES = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling}
H, F, HEADS, SEQUENCE, BATCH = 32, 64, 4, 8, 2
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

#: norm(found - exact) / norm(exact) of the output and of gradients without FP8.
ERROR = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (5e-3, 3e-2)}


def layer(dtype: torch.dtype = torch.float32, **arguments) -> te.TransformerLayer:
    """With parameters that are all different from what they start with."""
    module = te.TransformerLayer(H, F, HEADS, params_dtype=dtype, **QUIET | arguments)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
    return module


def data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SEQUENCE, BATCH, H, dtype=dtype), torch.randn(SEQUENCE, BATCH, H, dtype=dtype)


def step(module: te.TransformerLayer, x: torch.Tensor, gy: torch.Tensor, chosen=None) -> dict[str, torch.Tensor]:
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(inp)
    y.backward(gy)
    return {"y": y.detach(), "gx": inp.grad} | {k: v.grad for k, v in module.named_parameters()}


def exact_step(exact: Exact, x: torch.Tensor, gy: torch.Tensor) -> dict[str, torch.Tensor]:
    inp = x.detach().double().requires_grad_()
    y = exact(inp.transpose(0, 1)).transpose(0, 1)
    y.backward(gy.double())
    return {"y": y.detach(), "gx": inp.grad} | {k: v.grad for k, v in exact.wide.items()}


#: Arguments of the layer, and of its float64 counterpart.
CONFIGURED = {
    "defaults": ({}, {}),
    "gqa_rmsnorm_swiglu": (
        {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
        {},
    ),
    "zero_centered": ({"zero_centered_gamma": True}, {}),
    "residual_after_norm": ({"apply_residual_connection_post_layernorm": True}, {"post": True}),
    "output_layernorm": ({"output_layernorm": True}, {"output_norm": True}),
}


@pytest.mark.parametrize("name", CONFIGURED)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_without_fp8_output_and_gradients_are_those_of_float64(dtype, name):
    arguments, written = CONFIGURED[name]
    module = layer(dtype, **arguments)
    x, gy = data(dtype)
    found, exact = step(module, x, gy), exact_step(Exact(module, **written), x, gy)
    assert found.keys() == exact.keys()
    assert {value.dtype for value in found.values()} == {dtype}
    for key, value in found.items():
        # The bias of keys shifts all scores of a row alike: its gradient is zero but for rounding.
        if not key.endswith("key_bias"):
            assert closeness.relative_error(value, exact[key]) <= ERROR[dtype][key != "y"], key


def test_residual_after_norm_without_a_first_norm_adds_what_attention_read():
    module = layer(apply_residual_connection_post_layernorm=True, output_layernorm=True)
    x, _ = data()
    mlp, attended = module.layernorm_mlp, module.self_attention(x)
    between = x + attended[0] + attended[1]
    result, bias, normed = mlp(between)
    assert torch.allclose(module(x), module.layernorm(normed + (result + bias)), atol=1e-5)


def test_a_bf16_residual_takes_result_and_bias_in_fp32_and_rounds_once():
    module = layer(torch.bfloat16)
    x, _ = data(torch.bfloat16)
    result, bias = module.self_attention(x)
    between = (x.float() + (result.float() + bias.float())).bfloat16()  # G6
    result, bias = module.layernorm_mlp(between)
    assert torch.equal(module(x), (between.float() + (result.float() + bias.float())).bfloat16())


def test_batch_first_is_the_same_layer():
    first, second = layer(), layer(attn_input_format="bshd")
    second.load_state_dict(first.state_dict())
    x, _ = data()
    assert closeness.relative_error(second(x.transpose(0, 1)).transpose(0, 1), first(x)) <= 1e-6


def test_masks_and_angles_reach_attention():
    module = layer(self_attn_mask_type="no_mask")
    x, _ = data()
    angles = te.RotaryPositionEmbedding(H // HEADS)(SEQUENCE)
    assert torch.equal(module(x, self_attn_mask_type="causal"), layer_of(module, "causal")(x))
    assert not torch.equal(module(x, rotary_pos_emb=angles), module(x))
    mask = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    mask[:, :, :, -3:] = True
    padded = module(x, attention_mask=mask, self_attn_mask_type="padding")
    assert torch.allclose(padded[:-3], module(x[:-3]), atol=1e-6)


def layer_of(module: te.TransformerLayer, mask_type: str) -> te.TransformerLayer:
    made = layer(self_attn_mask_type=mask_type)
    made.load_state_dict(module.state_dict())
    return made


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_a_sequence_of_nothing_but_padding_stays_finite_in_every_gradient(name):
    chosen = RECIPES[name]() if name != "plain" else None
    module, (x, gy) = layer(self_attn_mask_type="padding"), data()
    mask = torch.zeros(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    mask[0] = True
    inp = (x * 100).requires_grad_()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(inp, attention_mask=mask)
    y.backward(gy)
    assert y.isfinite().all()
    assert all(value.grad.isfinite().all() for value in (inp, *module.parameters()))


@pytest.mark.parametrize("name", RECIPES)
def test_fp8_stays_near_and_every_product_is_quantized(name):
    module, (x, gy) = layer(), data()
    plain, found = step(module, x, gy), step(module, x, gy, RECIPES[name]())
    assert all(part.fp8 for part in (module.self_attention.layernorm_qkv, module.self_attention.proj))
    assert module.layernorm_mlp.fp8
    assert 0.002 < closeness.relative_error(found["y"], plain["y"]) < 0.1
    for key in ("gx", "layernorm_mlp.fc2_weight", "self_attention.proj.weight"):
        assert 0.005 < closeness.relative_error(found[key], plain[key]) < 0.3, key


@pytest.mark.parametrize("part", ["hidden_dropout", "attention_dropout"])
def test_dropout_is_for_training_and_follows_the_seed(part):
    module, (x, _) = layer(**{part: 0.5}), data()
    torch.manual_seed(3)
    first = module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert not torch.equal(module(x), first)
    module.eval()
    still = layer_of(module, "causal").eval()
    assert torch.equal(module(x), still(x))


def test_hidden_dropout_drops_its_share_of_what_a_part_gave_and_scales_the_rest():
    module = layer(hidden_dropout=0.25)
    for part in (module.self_attention.proj, module.layernorm_mlp):
        torch.nn.init.zeros_(getattr(part, "weight", None) if hasattr(part, "weight") else part.fc2_weight)
    torch.nn.init.constant_(module.self_attention.proj.bias, 3.0)
    torch.nn.init.zeros_(module.layernorm_mlp.fc2_bias)
    x = torch.zeros(64, 4, H)
    given = module(x)
    assert set(given.unique().tolist()) == {0.0, 4.0}
    assert abs((given == 0).float().mean().item() - 0.25) < 0.02


def test_attention_dropout_draws_under_the_trackers_fork_and_hidden_dropout_does_not():
    tracker = te.RNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    module = layer(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    before, held = torch.get_rng_state(), tracker.get_states()
    module(data()[0])
    torch.set_rng_state(before)
    data()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    x, _ = data()
    module(x)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(tracker.get_states()["model-parallel-rng"]["cpu"], held["model-parallel-rng"]["cpu"])


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_microbatches_and_main_grad_reach_every_weight(name):
    chosen = RECIPES[name]() if name != "plain" else None
    module = layer(fuse_wgrad_accumulation=True, fuse_qkv_params=True)
    weights = [value for key, value in module.named_parameters() if value.dim() == 2]
    assert len(weights) == 4
    for weight in weights:
        weight.main_grad = torch.full_like(weight, float("nan"))
    x, gy = data()
    for flag in (True, False):
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x, is_first_microbatch=flag)
        y.backward(gy)
    for weight in weights:
        assert weight.grad is None
        assert weight.main_grad.isfinite().all()
        assert weight.main_grad.any()


def test_parameter_names_are_those_of_transformer_engine():
    names = [name for name, _ in te.TransformerLayer(H, F, HEADS, fuse_qkv_params=True).named_parameters()]
    assert names == [
        *(
            f"self_attention.layernorm_qkv.{part}"
            for part in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
        ),
        *("self_attention.proj.weight", "self_attention.proj.bias"),
        *(f"layernorm_mlp.layer_norm_{part}" for part in ("weight", "bias")),
        *(f"layernorm_mlp.{layer}_{part}" for layer in ("fc1", "fc2") for part in ("weight", "bias")),
    ]
    unfused = te.TransformerLayer(H, F, HEADS, output_layernorm=True, bias=False).state_dict()
    assert {key for key in unfused if not key.endswith("_extra_state")} == {
        *(f"self_attention.qkv.{part}_weight" for part in ("query", "key", "value")),
        *("self_attention.proj.weight", "layernorm.weight", "layernorm.bias"),
        *("layernorm_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_bias"),
        *("layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight"),
    }


def test_weights_without_extra_state_load_strictly():
    first, second = layer(), layer()
    weights = {key: value for key, value in first.state_dict().items() if not key.endswith("_extra_state")}
    second.load_state_dict(weights, strict=True)
    x, _ = data()
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("name", ["plain", *RECIPES])
def test_every_extra_state_is_a_cpu_uint8_tensor_that_loads_without_pickle(name):
    chosen = RECIPES[name]() if name != "plain" else None
    module, (x, gy) = layer(output_layernorm=True), data()
    step(module, x, gy, chosen)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    states = {key: value for key, value in loaded.items() if key.endswith("_extra_state")}
    assert {(value.dtype, value.device.type) for value in states.values()} == {(torch.uint8, "cpu")}
    with_values = {key.rpartition(".")[0] for key, value in states.items() if value.numel()}
    quantizing = {"self_attention.qkv", "self_attention.proj", "layernorm_mlp"}
    assert with_values == (quantizing if name == "delayed" else set())


@pytest.mark.parametrize("name", RECIPES)
def test_training_with_dropout_goes_on_from_a_file_bit_for_bit(name):
    dropping = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    batches = [data() for _ in range(6)]

    def train(module: te.TransformerLayer, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        optimizer, chosen = torch.optim.SGD(module.parameters(), lr=0.1), RECIPES[name]()
        for x, gy in steps:
            y = step(module, x, gy, chosen)["y"]
            optimizer.step()
        return y

    first, file = layer(**dropping), io.BytesIO()
    train(first, batches[:3])
    torch.save({"model": first.state_dict(), "random": torch.get_rng_state()}, file)
    straight = train(first, batches[3:])
    second = layer(**dropping)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    torch.set_rng_state(saved["random"])
    assert torch.equal(train(second, batches[3:]), straight)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_reloaded_layer_goes_on_in_the_same_way(name):
    first, (x, gy) = layer(), data()
    step(first, x, gy, RECIPES[name]())
    second = layer()
    second.load_state_dict(first.state_dict())
    a, b = step(first, x, gy, RECIPES[name]()), step(second, x, gy, RECIPES[name]())
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_an_empty_batch_gives_an_empty_result():
    module = layer()
    for chosen in (None, *(make() for make in RECIPES.values())):
        found = step(module, torch.empty(SEQUENCE, 0, H), torch.empty(SEQUENCE, 0, H), chosen)
        assert found["y"].shape == (SEQUENCE, 0, H)


def test_an_odd_number_of_tokens_under_fp8_is_refused_naming_layer_and_part():
    module = layer(layer_number=3)
    with (
        pytest.raises(ValueError, match=r"'layer_3\.self_attention\.layernorm_linear_qkv'.*leading sizes, 14"),
        te.autocast(),
    ):
        module(torch.randn(7, 2, H))


@pytest.mark.parametrize(("heads", "groups"), [(32, 5), (32, 0), (5, None)], ids=str)
def test_head_counts_that_do_not_divide_are_refused_at_construction(heads, groups):
    with pytest.raises(ValueError, match="TransformerLayer: num_"):
        te.TransformerLayer(1024, 2048, heads, num_gqa_groups=groups)
