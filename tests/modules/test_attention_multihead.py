"""MultiheadAttention: plain torch in float64 around it, recorded weights, FP8, what reaches its parts."""

from __future__ import annotations

import attention_by_hand as by_hand
import closeness
import golden_values
import pytest
import torch
from multihead import CHANNELS, GROUPS, HEADS, HIDDEN, STORED, B, S, made
from norm_reference import normalised
from torch.nn import functional

import te_hal.modules as te
from te_hal import recipe

SCALE = CHANNELS**-0.5
#: One rounding is 6e-8 in fp32 and 2e-3 in bf16. fp32: those of sums of up to 40 products, four of them in a row.
#: bf16: those of the four tensors that are rounded between input and result.
FP32_BOUND, BF16_BOUND = 2e-6, 1e-2


def weights_of(module: te.MultiheadAttention, stored: str, kind: str) -> list[torch.Tensor]:
    """Weights (or biases) of queries, keys and values, cut out row by row."""
    holder = module.layernorm_qkv if module.input_layernorm else module.qkv
    if stored == "split":
        return [getattr(holder, f"{part}_{kind}") for part in ("query", "key", "value")]
    rows = list(getattr(holder, kind))
    shared = HEADS // GROUPS
    owners = ["q"] * (HEADS * CHANNELS) + ["k"] * (GROUPS * CHANNELS) + ["v"] * (GROUPS * CHANNELS)
    if stored == "interleaved":
        owners = (["q"] * (shared * CHANNELS) + ["k"] * CHANNELS + ["v"] * CHANNELS) * GROUPS
    return [torch.stack([row for row, owner in zip(rows, owners, strict=True) if owner == part]) for part in "qkv"]


def exact(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor] | list[None],
    proj: torch.nn.Module,
    seen: torch.Tensor,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multi-head attention of ``[s, b, hidden]`` in float64."""
    mixed = [
        functional.linear(x, weight.double(), None if bias is None else bias.double()).unflatten(-1, (-1, CHANNELS))
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if angles is not None:
        mixed[:2] = [turned(part, angles) for part in mixed[:2]]
    query, key, value = (by_hand.heads_first(part, "sbhd") for part in mixed)
    context = by_hand.merged(by_hand.attend(query, key, value, seen, SCALE), "sbhd")
    return functional.linear(context, proj.weight.double(), None if not proj.use_bias else proj.bias.double())


def turned(part: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = part.chunk(2, -1)
    return part * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("stored", STORED)
def test_output_and_gradients_are_those_of_float64(stored, qkv_format, bias, rotary):
    module = made(qkv_format=qkv_format, bias=bias, **STORED[stored])
    x, gy = torch.randn(S, B, HIDDEN), torch.randn(S, B, HIDDEN)
    angles = te.RotaryPositionEmbedding(CHANNELS)(S) if rotary else None
    given = (x if qkv_format == "sbhd" else x.transpose(0, 1)).requires_grad_()
    y = module(given, rotary_pos_emb=angles)
    y.backward(gy if qkv_format == "sbhd" else gy.transpose(0, 1))
    found = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    doubled = x.detach().double().requires_grad_()
    weights = weights_of(module, stored, "weight")
    biases = weights_of(module, stored, "bias") if bias else [None] * 3
    seen = by_hand.visible("causal", (B, HEADS, S, S))
    expected = exact(doubled, weights, biases, module.proj, seen, None if angles is None else angles.double())
    expected.backward(gy.double())
    order = (0, 1, 2) if qkv_format == "sbhd" else (1, 0, 2)
    assert closeness.relative_error(y.permute(order), expected) <= FP32_BOUND
    assert closeness.relative_error(given.grad.permute(order), doubled.grad) <= FP32_BOUND
    for name, parameter in module.named_parameters():  # gradients of a bias of keys alone are 0
        if name != "qkv.key_bias" or rotary:
            assert closeness.relative_error(found[name], parameter.grad) <= 2 * FP32_BOUND, name


@pytest.mark.parametrize("stored", STORED)
def test_cross_attention_takes_keys_and_values_from_the_encoder(stored):
    module = made(attention_type="cross", attn_mask_type="padding", **STORED[stored])
    x, memory = torch.randn(S, B, HIDDEN, requires_grad=True), torch.randn(S + 3, B, HIDDEN, requires_grad=True)
    masks = torch.zeros(B, 1, 1, S, dtype=torch.bool), torch.zeros(B, 1, 1, S + 3, dtype=torch.bool)
    masks[0][0, ..., -1], masks[1][1, ..., -4:] = True, True
    y = module(x, attention_mask=masks, encoder_output=memory)
    gy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, memory), gy)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, memory)]
    if stored == "split":
        pairs = [[getattr(module.key_value, f"{part}_{kind}") for part in ("key", "value")] for kind in KINDS]
    else:
        pairs = [pair_of(getattr(module.key_value, kind), stored) for kind in KINDS]
    mixed = [
        functional.linear(source, weight.double(), bias.double()).unflatten(-1, (-1, CHANNELS))
        for source, weight, bias in (
            (doubles[0], module.query_layer.weight, module.query_layer.bias),
            (doubles[1], pairs[0][0], pairs[1][0]),
            (doubles[1], pairs[0][1], pairs[1][1]),
        )
    ]
    seen = by_hand.visible("padding", (B, HEADS, S, S + 3), masks)
    context = by_hand.attend(*(by_hand.heads_first(part, "sbhd") for part in mixed), seen, SCALE)
    expected = functional.linear(
        by_hand.merged(context, "sbhd"), module.proj.weight.double(), module.proj.bias.double()
    )
    assert closeness.relative_error(y, expected) <= FP32_BOUND
    for gradient, target in zip(found, torch.autograd.grad(expected, doubles, gy.double()), strict=True):
        assert closeness.relative_error(gradient, target) <= FP32_BOUND


KINDS = ("weight", "bias")


def pair_of(rows: torch.Tensor, stored: str) -> list[torch.Tensor]:
    """Rows of keys and rows of values in a fused weight or bias of both."""
    owners = ["k"] * (GROUPS * CHANNELS) + ["v"] * (GROUPS * CHANNELS)
    if stored == "interleaved":
        owners = (["k"] * CHANNELS + ["v"] * CHANNELS) * GROUPS
    return [torch.stack([row for row, owner in zip(rows, owners, strict=True) if owner == part]) for part in "kv"]


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("stored", STORED)
def test_a_norm_may_come_first_and_what_it_gave_may_be_returned(stored, normalization, zero_centered):
    module = made(
        input_layernorm=True,
        return_layernorm_output=True,
        normalization=normalization,
        zero_centered_gamma=zero_centered,
        layernorm_epsilon=0.01,
        **STORED[stored],
    )
    x, gy, gn = torch.randn(3, S, B, HIDDEN)
    x.requires_grad_()
    y, norm = module(x)
    torch.autograd.backward((y, norm), (gy, gn))
    gamma, beta = module.layernorm_qkv.layer_norm_weight, getattr(module.layernorm_qkv, "layer_norm_bias", None)
    found = [y, norm, x.grad, gamma.grad.clone()]
    module.zero_grad()
    doubled = x.detach().double().requires_grad_()
    beta = None if normalization == "RMSNorm" else beta.double()
    after = normalised(doubled, gamma.double(), beta, 0.01, zero_centered=zero_centered)
    arguments = [weights_of(module, stored, kind) for kind in KINDS]
    expected = exact(after, *arguments, module.proj, by_hand.visible("causal", (B, HEADS, S, S)))
    torch.autograd.backward((expected, after), (gy.double(), gn.double()))
    for value, target in zip(found, [expected, after, doubled.grad, gamma.grad], strict=True):
        assert closeness.relative_error(value, target) <= 2 * FP32_BOUND


def test_bf16_is_within_its_roundings_of_float64():
    module = made(fuse_qkv_params=True, params_dtype=torch.bfloat16)
    x, gy = torch.randn(2, S, B, HIDDEN).bfloat16()
    x.requires_grad_()
    y = module(x)
    y.backward(gy)
    doubled = x.detach().double().requires_grad_()
    arguments = [weights_of(module, "interleaved", kind) for kind in KINDS]
    expected = exact(doubled, *arguments, module.proj, by_hand.visible("causal", (B, HEADS, S, S)))
    expected.backward(gy.double())
    assert closeness.relative_error(y, expected) <= BF16_BOUND
    assert closeness.relative_error(x.grad, doubled.grad) <= BF16_BOUND


def test_a_pair_of_angles_rotates_queries_and_keys_apart_in_neighbours_where_asked():
    module = made(fuse_qkv_params=True, rotary_pos_interleaved=True)
    x = torch.randn(S, B, HIDDEN)
    angles = te.RotaryPositionEmbedding(4, interleaved=True)(S), torch.randn(S, 1, 1, 8)
    seen = []
    module.core_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    module(x, rotary_pos_emb=angles)
    module(x)
    (query, key, value), plain = seen
    assert torch.equal(query, te.apply_rotary_pos_emb(plain[0], angles[0], interleaved=True))
    assert torch.equal(key, te.apply_rotary_pos_emb(plain[1], angles[1], interleaved=True))
    assert torch.equal(value, plain[2])


def test_the_attention_of_a_recorded_transformer_layer_loads_strictly():
    layer = golden_values.load("modules_bf16").case("TransformerLayer/bfloat16/none/param")
    start = "self_attention."
    recorded = {key[len(start) :]: value for key, value in layer.items() if key.startswith(start)}
    module = te.MultiheadAttention(128, 4, input_layernorm=True, fuse_qkv_params=True, params_dtype=torch.bfloat16)
    module.load_state_dict(recorded, strict=True)
    assert torch.equal(module.layernorm_qkv.weight, recorded["layernorm_qkv.weight"])


def test_a_state_without_extra_state_loads_strictly():
    module = made()
    weights = {key: value for key, value in module.state_dict().items() if not key.endswith("_extra_state")}
    other = made()
    other.load_state_dict(weights, strict=True)
    x = torch.randn(S, B, HIDDEN)
    assert torch.equal(other(x), module(x))


def test_the_bias_can_be_returned_instead_of_added():
    module = made()
    x = torch.randn(S, B, HIDDEN)
    whole = module(x)
    module.return_bias = module.proj.return_bias = True
    output, bias = module(x)
    assert bias is module.proj.bias
    torch.testing.assert_close(output + bias, whole)


@pytest.mark.parametrize("chosen", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()], ids=lambda r: r.family)
def test_under_fp8_it_is_fp8_projections_around_attention_in_bf16(chosen):
    sizes = (32, 4)
    arguments = {"attention_dropout": 0.0, "fuse_qkv_params": True, "params_dtype": torch.bfloat16}
    module = te.MultiheadAttention(*sizes, qkv_weight_interleaved=False, **arguments)
    qkv = te.Linear(32, 96, params_dtype=torch.bfloat16)
    proj = te.Linear(32, 32, params_dtype=torch.bfloat16)
    attention = te.DotProductAttention(4, 8)
    qkv.load_state_dict(module.qkv.state_dict())
    proj.load_state_dict(module.proj.state_dict())
    for _ in range(2):
        x = torch.randn(8, 2, 32, dtype=torch.bfloat16)
        results = []
        for whole in (True, False):
            given = x.clone().requires_grad_()
            with te.autocast(recipe=chosen):
                y = (
                    module(given)
                    if whole
                    else proj(attention(*(p.unflatten(-1, (4, 8)) for p in qkv(given).chunk(3, -1))))
                )
            y.float().square().sum().backward()
            results += [(y, given.grad)]
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(module.qkv.weight.grad, qkv.weight.grad)


def test_weights_are_initialised_under_the_tracker_and_by_the_functions_given():
    def tracker() -> te.RNGStatesTracker:
        made_now = te.RNGStatesTracker()
        made_now.add("model-parallel-rng", 5)
        return made_now

    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(te.MultiheadAttention(HIDDEN, HEADS, get_rng_state_tracker=tracker).state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    module = te.MultiheadAttention(
        HIDDEN, HEADS, init_method=torch.nn.init.ones_, output_layer_init_method=torch.nn.init.zeros_
    )
    assert all(bool((weight == 1).all()) for name, weight in module.qkv.named_parameters() if "weight" in name)
    assert not module.proj.weight.any()


def test_dropout_draws_in_training_only():
    module = made(attention_dropout=0.5)
    x = torch.randn(S, B, HIDDEN)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_microbatches_and_a_mask_type_for_one_call_reach_the_parts():
    module = made(fuse_qkv_params=True)
    seen = {}
    for name, part in module.named_children():
        part.register_forward_pre_hook(lambda _, __, kwargs, name=name: seen.update({name: kwargs}), with_kwargs=True)
    mask = torch.rand(B, 1, S, S) < 0.5
    module(torch.randn(S, B, HIDDEN), mask, attn_mask_type="arbitrary", is_first_microbatch=True)
    assert seen["qkv"] == seen["proj"] == {"is_first_microbatch": True}
    assert seen["core_attention"]["attention_mask"] is mask
    assert seen["core_attention"]["attn_mask_type"] == "arbitrary"


def test_main_grad_is_written_for_fused_weights():
    module = made(fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    other = made(fuse_qkv_params=True)
    other.load_state_dict(module.state_dict())
    x = torch.randn(S, B, HIDDEN)
    for part in (module.qkv, module.proj):
        part.weight.main_grad = torch.zeros(part.weight.shape)
    module(x).sum().backward()
    other(x).sum().backward()
    torch.testing.assert_close(module.qkv.weight.main_grad, other.qkv.weight.grad)
    torch.testing.assert_close(module.proj.weight.main_grad, other.proj.weight.grad)
