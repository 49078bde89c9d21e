"""MultiheadAttention: plain torch in float64 around it, Transformer Engine's parameter names, FP8, refusals."""

from __future__ import annotations

import inspect

import attention_by_hand as by_hand
import closeness
import golden_values
import pytest
import torch
from norm_reference import normalised
from torch.nn import functional

import te_hal.modules as te
from te_hal import recipe

B, S, HIDDEN, HEADS, GROUPS, CHANNELS = 2, 6, 32, 4, 2, 10
SCALE = CHANNELS**-0.5
#: How the weight that gives queries, keys and values is stored.
STORED = {
    "split": {"fuse_qkv_params": False},
    "interleaved": {"fuse_qkv_params": True},
    "concatenated": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}
FP32_BOUND, BF16_BOUND = 2e-6, 1e-2


def made(**arguments: object) -> te.MultiheadAttention:
    module = te.MultiheadAttention(
        HIDDEN, HEADS, **{"kv_channels": CHANNELS, "num_gqa_groups": GROUPS, "attention_dropout": 0.0, **arguments}
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


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


NAMES = {
    "split": (
        {},
        {
            "qkv.query_weight": (40, 32),
            "qkv.key_weight": (20, 32),
            "qkv.value_weight": (20, 32),
            "qkv.query_bias": (40,),
            "qkv.key_bias": (20,),
            "qkv.value_bias": (20,),
        },
    ),
    "fused": ({"fuse_qkv_params": True}, {"qkv.weight": (80, 32), "qkv.bias": (80,)}),
    "cross": (
        {"attention_type": "cross", "bias": False},
        {"query_layer.weight": (40, 32), "key_value.key_weight": (20, 32), "key_value.value_weight": (20, 32)},
    ),
    "cross, fused": (
        {"attention_type": "cross", "bias": False, "fuse_qkv_params": True},
        {"query_layer.weight": (40, 32), "key_value.weight": (40, 32)},
    ),
}


NORM = {"layer_norm_weight": (32,), "layer_norm_bias": (32,)}
NAMES["norm"] = (
    {"input_layernorm": True, "fuse_qkv_params": True},
    {f"layernorm_qkv.{name}": shape for name, shape in ({"weight": (80, 32), "bias": (80,)} | NORM).items()},
)
NAMES["norm, cross"] = (
    {"input_layernorm": True, "attention_type": "cross", "bias": False},
    {f"layernorm_query.{name}": shape for name, shape in ({"query_weight": (40, 32)} | NORM).items()}
    | {"key_value.key_weight": (20, 32), "key_value.value_weight": (20, 32)},
)
NAMES["norm, cross, fused"] = (
    {"input_layernorm": True, "attention_type": "cross", "bias": False, "fuse_qkv_params": True},
    {f"layernorm_query.{name}": shape for name, shape in ({"weight": (40, 32)} | NORM).items()}
    | {"key_value.weight": (40, 32)},
)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_transformer_engines_names_and_shapes(name):
    arguments, expected = NAMES[name]
    module = made(**arguments)
    found = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    proj = {"proj.weight": (32, 40)} | ({"proj.bias": (32,)} if arguments.get("bias", True) else {})
    assert found == expected | proj
    extra = {key for key in module.state_dict() if key not in found}
    assert extra == {f"{part}._extra_state" for part, _ in module.named_children()}


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
    assert seen["core_attention"] == {"attention_mask": mask, "attn_mask_type": "arbitrary"}


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


CONSTRUCTOR = {
    "heads": ({"num_attention_heads": 5, "kv_channels": None}, "num_attention_heads: got 5 heads for hidden_size=32"),
    "groups": ({"num_gqa_groups": 3}, "num_gqa_groups: got 3 groups for num_attention_heads=4"),
    "hidden": ({"hidden_size": -1}, "hidden_size: got -1"),
    "mask": ({"attn_mask_type": "triangle"}, "attn_mask_type: got 'triangle'"),
    "type": ({"attention_type": "self_"}, "attention_type: got 'self_'"),
    "norm": ({"normalization": "BatchNorm"}, "normalization: got 'BatchNorm'"),
    "main_grad": ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation: got True with fuse_qkv_params=False"),
    "norm output": ({"return_layernorm_output": True}, "return_layernorm_output: got True with input_layernorm=False"),
    "flag": ({"bias": "no"}, "bias: got 'no'"),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_refuses_what_cannot_be(name):
    arguments, message = CONSTRUCTOR[name]
    with pytest.raises(ValueError, match=message):
        te.MultiheadAttention(**{"hidden_size": HIDDEN, "num_attention_heads": HEADS, **arguments})


CALLS = {
    "encoder too much": ({"encoder_output": torch.zeros(S, B, HIDDEN)}, ValueError, "encoder_output: got a tensor"),
    "size": ({"hidden_states": torch.zeros(S, B, 31)}, ValueError, r"hidden_states: got shape \(6, 2, 31\)"),
    "rank": ({"hidden_states": torch.zeros(S, HIDDEN)}, ValueError, r"hidden_states: .*accepted: \[s, b, 32\]"),
    "none": ({"hidden_states": None}, TypeError, "hidden_states: got a NoneType"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_fit_is_refused_with_what_would(name):
    arguments, error, message = CALLS[name]
    with pytest.raises(error, match=f"MultiheadAttention 'here': {message}"):
        made(name="here")(**{"hidden_states": torch.zeros(S, B, HIDDEN), **arguments})


def test_cross_attention_without_the_encoders_output_is_refused():
    with pytest.raises(ValueError, match=r"encoder_output: got None; .*this module's is 'cross'"):
        made(attention_type="cross")(torch.zeros(S, B, HIDDEN))


LATER_CONSTRUCTOR = {
    "window_size": (128, 0),
    "bottom_right_diagonal": True,
    "tp_group": object(),
    "tp_size": 2,
    "sequence_parallel": True,
    "set_parallel_mode": True,
    "ub_bulk_wgrad": True,
    "ub_bulk_dgrad": True,
    "ub_overlap_rs_dgrad": True,
    "ub_overlap_rs": True,
    "ub_overlap_ag": True,
    "qk_norm_type": "RMSNorm",
    "qk_norm_eps": 1e-5,
    "qk_norm_before_rope": True,
    "seq_length": 8,
    "micro_batch_size": 2,
    "softmax_type": "learnable",
}
USED = {"hidden_states", "attention_mask", "encoder_output", "attn_mask_type", "is_first_microbatch", "rotary_pos_emb"}
LATER_CALL = {
    "window_size": (2, 0),
    "bottom_right_diagonal": False,
    "checkpoint_core_attention": True,
    "inference_params": object(),
    "core_attention_bias_type": "alibi",
    "core_attention_bias": torch.zeros(1),
    "alibi_slopes": torch.zeros(4),
    "cu_seqlens_q": torch.zeros(3),
    "cu_seqlens_kv": torch.zeros(3),
    "cu_seqlens_q_padded": torch.zeros(3),
    "cu_seqlens_kv_padded": torch.zeros(3),
    "max_seqlen_q": 4,
    "max_seqlen_kv": 4,
    "fast_zero_fill": False,
    "pad_between_seqs": True,
}


@pytest.mark.parametrize("argument", LATER_CONSTRUCTOR)
def test_a_constructor_argument_of_a_later_feature_is_refused_by_name(argument):
    with pytest.raises(NotImplementedError, match=f"MultiheadAttention: {argument}: got .*not built yet"):
        made(**{argument: LATER_CONSTRUCTOR[argument]})


@pytest.mark.parametrize("argument", LATER_CALL)
def test_a_forward_argument_of_a_later_feature_is_refused_by_name(argument):
    with pytest.raises(NotImplementedError, match=f"MultiheadAttention: {argument}: got .*not built yet"):
        made()(torch.zeros(S, B, HIDDEN), **{argument: LATER_CALL[argument]})


def test_every_forward_argument_either_counts_or_is_refused_above():
    assert {*inspect.signature(te.MultiheadAttention.forward).parameters} == {"self"} | USED | {*LATER_CALL}
