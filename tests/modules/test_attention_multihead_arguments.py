"""MultiheadAttention: names and shapes of its parameters, and arguments that are refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from multihead import HEADS, HIDDEN, B, S, made

import te_hal.modules as te

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
    "window": ({"window_size": (1, 2, 3)}, r"window_size: got \(1, 2, 3\)"),
    "softmax": ({"softmax_type": "soft"}, "softmax_type: got 'soft'"),
    "qk norm": ({"qk_norm_type": "BatchNorm"}, "qk_norm_type: got 'BatchNorm'; accepted: 'L2Normalization', 'RMSNorm'"),
    "qk norm eps": ({"qk_norm_eps": -1.0}, "qk_norm_eps: got -1.0"),
    "qk norm place": ({"qk_norm_before_rope": None}, "qk_norm_before_rope: got None"),
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
    "one angle": ({"rotary_pos_emb": (torch.zeros(S, 1, 1, 2),)}, ValueError, "rotary_pos_emb: got 1 of them"),
    "three angles": ({"rotary_pos_emb": (torch.zeros(S, 1, 1, 2),) * 3}, ValueError, "rotary_pos_emb: got 3 of them"),
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
    "tp_group": object(),
    "tp_size": 2,
    "sequence_parallel": True,
    "set_parallel_mode": True,
    "ub_bulk_wgrad": True,
    "ub_bulk_dgrad": True,
    "ub_overlap_rs_dgrad": True,
    "ub_overlap_rs": True,
    "ub_overlap_ag": True,
}


@pytest.mark.parametrize("argument", LATER_CONSTRUCTOR)
def test_a_constructor_argument_of_a_later_feature_is_refused_by_name(argument):
    with pytest.raises(NotImplementedError, match=f"MultiheadAttention: {argument}: got .*leave it out: "):
        made(**{argument: LATER_CONSTRUCTOR[argument]})


#: What attention itself takes.
PASSED_ON = {
    "attention_mask": torch.zeros(B, 1, 1, S, dtype=torch.bool),
    "attn_mask_type": "padding",
    "window_size": (2, 0),
    "bottom_right_diagonal": False,
    "core_attention_bias_type": "alibi",
    "core_attention_bias": torch.zeros(1, 1, 1, 1),
    "alibi_slopes": torch.zeros(HEADS),
    "cu_seqlens_q": torch.zeros(3),
    "cu_seqlens_kv": torch.zeros(3),
    "cu_seqlens_q_padded": torch.zeros(3),
    "cu_seqlens_kv_padded": torch.zeros(3),
    "max_seqlen_q": 4,
    "max_seqlen_kv": 4,
    "fast_zero_fill": False,
    "pad_between_seqs": True,
    "checkpoint_core_attention": True,
    "inference_params": None,
}
OWN = {"hidden_states", "encoder_output", "is_first_microbatch", "rotary_pos_emb"}


def test_every_forward_argument_is_the_modules_own_or_attentions():
    assert {*inspect.signature(te.MultiheadAttention.forward).parameters} == {"self"} | OWN | {*PASSED_ON}


def test_attention_gets_what_it_takes_as_it_was_given(monkeypatch):
    module, seen = made(), {}

    def attend(query: torch.Tensor, *_: torch.Tensor, **arguments: object) -> torch.Tensor:
        seen.update(arguments)
        return query.flatten(-2)

    monkeypatch.setattr(module.core_attention, "forward", attend)
    module(torch.zeros(S, B, HIDDEN), **PASSED_ON)
    assert {*seen} == {*PASSED_ON}
    assert all(seen[name] is value for name, value in PASSED_ON.items())


SETTINGS = {
    "window_size": (4, 0),
    "bottom_right_diagonal": False,
    "softmax_type": "learnable",
    "attn_mask_type": "padding_causal",
    "attention_dropout": 0.25,
    "qkv_format": "thd",
    "layer_number": 3,
}


def test_attention_is_made_with_the_modules_settings():
    attention = made(**SETTINGS).core_attention
    assert {name: getattr(attention, name) for name in SETTINGS} == SETTINGS
