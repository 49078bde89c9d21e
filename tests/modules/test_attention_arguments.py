"""What attention accepts, and what it refuses by name."""

from __future__ import annotations

import inspect

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import TeHalError

B, S, H, D = 2, 4, 4, 8
Q = torch.zeros(S, B, H, D)
PADDING = torch.zeros(B, 1, 1, S, dtype=torch.bool)

CONSTRUCTOR = {
    "groups 5 of 32 heads": ({"num_attention_heads": 32, "num_gqa_groups": 5}, "5 groups for num_attention_heads=32"),
    "groups 0": ({"num_gqa_groups": 0}, "num_gqa_groups: got 0"),
    "more groups than heads": ({"num_gqa_groups": 8}, "8 groups for num_attention_heads=4"),
    "heads 0": ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
    "heads as text": ({"num_attention_heads": "4"}, "num_attention_heads: got '4'"),
    "channels 0": ({"kv_channels": 0}, "kv_channels: got 0"),
    "three channels": ({"kv_channels": (8, 8, 8)}, r"kv_channels: got \(8, 8, 8\)"),
    "mask type": ({"attn_mask_type": "causual"}, "attn_mask_type: got 'causual'; accepted: no_mask, causal"),
    "mask type as list": ({"attn_mask_type": ["causal"]}, r"attn_mask_type: got \['causal'\]"),
    "format": ({"qkv_format": "hsbd"}, "qkv_format: got 'hsbd'; accepted: sbhd, bshd"),
    "attention type": ({"attention_type": "both"}, "attention_type: got 'both'"),
    "tracker": ({"get_rng_state_tracker": te.RNGStatesTracker}, None),
    "no tracker": ({"get_rng_state_tracker": "rng"}, "get_rng_state_tracker: got 'rng'"),
    "scale": ({"softmax_scale": "half"}, "softmax_scale: got 'half'"),
    "scale 0": ({"softmax_scale": 0.0}, "softmax_scale: got 0.0; accepted: a positive"),
    "negative scale": ({"softmax_scale": -0.5}, "softmax_scale: got -0.5; accepted: a positive"),
    "scale that fp32 rounds to 0": ({"softmax_scale": 1e-60}, "softmax_scale: got 1e-60"),
    "NaN scale": ({"softmax_scale": float("nan")}, "softmax_scale: got nan"),
    "infinite scale": ({"softmax_scale": float("inf")}, "softmax_scale: got inf"),
    "layer": ({"layer_number": 0}, "layer_number: got 0"),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_the_constructor_refuses_what_cannot_be(name):
    arguments, message = CONSTRUCTOR[name]
    made = {"num_attention_heads": H, "kv_channels": D, **arguments}
    if message is None:
        te.DotProductAttention(**made)
        return
    with pytest.raises(ValueError, match=f"DotProductAttention: .*{message}") as caught:
        te.DotProductAttention(**made)
    assert isinstance(caught.value, TeHalError)


CALLS = {
    "heads": (
        {"query_layer": torch.zeros(S, B, 3, D)},
        ValueError,
        r"query_layer: got shape \(4, 2, 3, 8\); acc.*4, 8",
    ),
    "channels": ({"key_layer": torch.zeros(S, B, H, 9)}, ValueError, r"key_layer: got shape \(4, 2, 4, 9\)"),
    "rank": ({"value_layer": torch.zeros(S, B, H * D)}, ValueError, r"value_layer: got shape \(4, 2, 32\)"),
    "batch": ({"query_layer": torch.zeros(S, 3, H, D)}, ValueError, "one batch size"),
    "values": ({"value_layer": torch.zeros(5, B, H, D)}, ValueError, "as many values as keys"),
    "missing": ({"value_layer": None}, TypeError, "value_layer: got a NoneType"),
    "dtypes": ({"key_layer": Q.half()}, ValueError, r"input of torch.float32, key of torch.float16"),
    "ints": ({"query_layer": Q.int()}, ValueError, r"input of torch.int32"),
    "device": ({"key_layer": Q.to("meta")}, ValueError, "input on cpu, key on meta"),
    "mask type": ({"attn_mask_type": "none"}, ValueError, "attn_mask_type: got 'none'; accepted: no_mask"),
    "format": ({"qkv_format": "bhsd"}, ValueError, "qkv_format: got 'bhsd'"),
    "mask too much": (
        {"attention_mask": ~PADDING},
        ValueError,
        "got a mask under attn_mask_type='causal' that hides more",
    ),
    "no mask": ({"attn_mask_type": "padding"}, ValueError, r"attention_mask: got None; accepted: bool \(2, 1, 1, 4\)"),
    "mask dtype": (
        {"attn_mask_type": "padding", "attention_mask": PADDING.float()},
        ValueError,
        r"attention_mask: got torch.float32 \(2, 1, 1, 4\) on cpu; accepted: bool \(2, 1, 1, 4\)",
    ),
    "mask shape": (
        {"attn_mask_type": "padding", "attention_mask": PADDING[:, 0, 0]},
        ValueError,
        r"got torch.bool \(2, 4\) .*accepted: bool \(2, 1, 1, 4\), True where a token is padding",
    ),
    "mask device": (
        {"attn_mask_type": "padding", "attention_mask": PADDING.to("meta")},
        ValueError,
        "on meta; .*make it on cpu",
    ),
    "mask size": (
        {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(B, 1, S, 3, dtype=torch.bool)},
        ValueError,
        r"accepted: bool, broadcasts to \(2, 4, 4, 4\), True where a key is hidden",
    ),
    "mask rank": (
        {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(1, 1, 1, S, S, dtype=torch.bool)},
        ValueError,
        r"broadcasts to \(2, 4, 4, 4\)",
    ),
    "three masks": ({"attn_mask_type": "padding", "attention_mask": (PADDING,) * 3}, ValueError, "got 3 masks"),
    "one mask for two": (
        {"attn_mask_type": "padding", "attention_mask": PADDING, "query_layer": torch.zeros(3, B, H, D)},
        ValueError,
        "got one mask for 3 queries and 4 keys",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_fit_is_refused_with_what_would(name):
    arguments, error, message = CALLS[name]
    module = te.DotProductAttention(H, D, name="here")
    with pytest.raises(error, match=f"DotProductAttention 'here'.*{message}") as caught:
        module(**{"query_layer": Q, "key_layer": Q, "value_layer": Q, **arguments})
    assert isinstance(caught.value, TeHalError)


@pytest.mark.parametrize("words", ["padding,causal", "causal,padding", "padding_causal"])
def test_the_order_of_the_words_of_a_mask_type_does_not_matter(words):
    assert te.DotProductAttention(H, D, attn_mask_type=words).attn_mask_type == "padding_causal"


LATER_CONSTRUCTOR = {
    "sequence_parallel": True,
    "tp_size": 2,
    "tp_group": object(),
    "cp_group": object(),
    "cp_global_ranks": [0],
    "cp_stream": object(),
    "cp_comm_type": "a2a",
}
#: Refused for good, with the reason.
REFUSED_CALL = {
    "fp8_output": (True, "attention runs in the activation dtype"),
    "bf16_backward": (True, "attention here runs in the activation dtype both ways"),
    "num_splits": (2, "how keys are split over kernels is up to torch"),
    "score_mod": (abs, "post_scale_bias"),
    "score_mod_bprop": (abs, "post_scale_bias"),
    "score_mod_tensors": ({}, "post_scale_bias"),
    "score_mod_bprop_tensors": ({}, "post_scale_bias"),
}


@pytest.mark.parametrize("argument", LATER_CONSTRUCTOR)
def test_a_constructor_argument_of_a_later_feature_is_refused_by_name(argument):
    with pytest.raises(NotImplementedError, match=f"DotProductAttention: {argument}: got .*leave it out: "):
        te.DotProductAttention(H, D, **{argument: LATER_CONSTRUCTOR[argument]})


@pytest.mark.parametrize("argument", REFUSED_CALL)
def test_an_argument_of_nvidias_kernels_is_refused_with_the_reason(argument):
    value, reason = REFUSED_CALL[argument]
    with pytest.raises(NotImplementedError, match=f"DotProductAttention: {argument}: got .*{reason}"):
        te.DotProductAttention(H, D)(Q, Q, Q, **{argument: value})


def test_both_ways_to_fill_outputs_give_the_same():
    query = torch.randn(S, B, H, D)
    module = te.DotProductAttention(H, D)
    assert torch.equal(module(query, query, query, fast_zero_fill=False), module(query, query, query))
    with pytest.raises(ValueError, match="fast_zero_fill: got 0"):
        module(query, query, query, fast_zero_fill=0)


#: What each argument of a call does is a test of these files.
USED = {
    "test_attention": {"query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "attn_mask_type"},
    "test_attention_windows": {"window_size", "bottom_right_diagonal"},
    "test_attention_packed": {
        *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q"),
        *("max_seqlen_kv", "pad_between_seqs", "qkv_layer", "kv_layer", "qkv_interleave_dim"),
    },
    "test_attention_scores": {"core_attention_bias_type", "core_attention_bias", "alibi_slopes"},
    "test_inference": {"inference_params"},
    "test_recompute_parts": {"checkpoint_core_attention"},
    "here": {"fast_zero_fill"},
}


def test_every_forward_argument_either_counts_or_is_refused_above():
    used = set().union(*USED.values())
    known = {"self"} | used | {*REFUSED_CALL}
    assert {*inspect.signature(te.DotProductAttention.forward).parameters} == known


def test_transforms_of_torch_func_are_refused():
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(te.DotProductAttention(H, D))(Q[None], Q[None], Q[None])


def test_a_state_dict_without_extra_state_loads_strictly_and_nothing_else_does():
    module = te.DotProductAttention(H, D)
    assert {key: value.numel() for key, value in module.state_dict().items()} == {"_extra_state": 0}
    module.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match="weight"):
        module.load_state_dict({"weight": torch.zeros(1)}, strict=True)
