"""Arguments of the modules made of several layers as Transformer Engine has them, and values that are refused."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch

import te_hal.modules as te

NEEDED = inspect.Parameter.empty


class Described(NamedTuple):
    """A module, what it needs, its arguments with their defaults, and values that are refused."""

    kind: type[torch.nn.Module]
    sizes: tuple[int, ...]
    arguments: dict[str, object]
    forward: dict[str, object]
    later: dict[str, object]
    wrong: dict[str, object]


PARALLEL = {"sequence_parallel": True, "tp_group": object(), "tp_size": 2}
OVERLAP = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), True
)
COMMON_WRONG = {
    "bias": "False",
    "normalization": "BatchNorm",
    "zero_centered_gamma": 1,
    "fuse_wgrad_accumulation": None,
    "params_dtype": torch.float64,
    "device": "no such device",
    "init_method": "normal",
    "get_rng_state_tracker": te.RNGStatesTracker(),
}

LAYERNORM_LINEAR = Described(
    te.LayerNormLinear,
    (32, 48),
    {
        "in_features": NEEDED,
        "out_features": NEEDED,
        "eps": 1e-5,
        "sequence_parallel": False,
        "fuse_wgrad_accumulation": False,
        "tp_group": None,
        "tp_size": 1,
        "get_rng_state_tracker": None,
        "init_method": None,
        "bias": True,
        "normalization": "LayerNorm",
        "return_bias": False,
        "params_dtype": None,
        "parallel_mode": None,
        "return_layernorm_output": False,
        "return_layernorm_output_gathered": False,
        "parameters_split": None,
        "zero_centered_gamma": False,
        "device": None,
        "ub_overlap_ag": False,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_wgrad": False,
        "ub_bulk_dgrad": False,
        "ub_name": None,
        "delay_wgrad_compute": False,
        "symmetric_ar_type": None,
        "name": None,
    },
    {"inp": NEEDED, "is_first_microbatch": None, "fp8_output": False, "fp8_grad": False},
    PARALLEL
    | OVERLAP
    | {
        "parallel_mode": "column",
        "return_layernorm_output_gathered": True,
        "ub_name": "qkv",
        "symmetric_ar_type": "multimem_all_reduce",
    },
    COMMON_WRONG
    | {
        "delay_wgrad_compute": 1,
        "eps": -1.0,
        "in_features": 0,
        "out_features": 2.0,
        "parameters_split": ("a", "b", "c", "d", "e"),
    },
)

LAYERNORM_MLP = Described(
    te.LayerNormMLP,
    (32, 64),
    {
        "hidden_size": NEEDED,
        "ffn_hidden_size": NEEDED,
        "eps": 1e-5,
        "sequence_parallel": False,
        "return_bias": False,
        "get_rng_state_tracker": None,
        "tp_group": None,
        "tp_size": 1,
        "init_method": None,
        "bias": True,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "activation_params": None,
        "output_layer_init_method": None,
        "fuse_wgrad_accumulation": False,
        "params_dtype": None,
        "return_layernorm_output": False,
        "return_layernorm_output_gathered": False,
        "seq_length": None,
        "micro_batch_size": None,
        "set_parallel_mode": False,
        "zero_centered_gamma": False,
        "device": None,
        "ub_overlap_ag": False,
        "name": None,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False,
        "ub_bulk_wgrad": False,
        "delay_wgrad_compute": False,
        "symmetric_ar_type": None,
        "checkpoint": False,
    },
    {"inp": NEEDED, "is_first_microbatch": None},
    PARALLEL
    | OVERLAP
    | {
        "return_layernorm_output_gathered": True,
        "set_parallel_mode": True,
        "symmetric_ar_type": "multimem_all_reduce",
    },
    COMMON_WRONG
    | {
        "checkpoint": None,
        "seq_length": 0,
        "micro_batch_size": True,
        "delay_wgrad_compute": 1,
        "eps": float("nan"),
        "hidden_size": True,
        "ffn_hidden_size": -8,
        "activation": "tanh",
        "activation_params": {"limit": 3.0},  # gelu has none
        "output_layer_init_method": 1,
    },
)

PACKING = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
)

TRANSFORMER = Described(
    te.TransformerLayer,
    (32, 64, 4),
    {
        "hidden_size": NEEDED,
        "ffn_hidden_size": NEEDED,
        "num_attention_heads": NEEDED,
        "num_gqa_groups": None,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init_method": None,
        "output_layer_init_method": None,
        "layer_number": None,
        "kv_channels": None,
        "self_attn_mask_type": "causal",
        "window_size": None,
        "bottom_right_diagonal": None,
        "enc_dec_attn_mask_type": "no_mask",
        "enc_dec_bottom_right_diagonal": None,
        "enc_dec_window_size": None,
        "tp_group": None,
        "tp_size": 1,
        "params_dtype": None,
        "get_rng_state_tracker": None,
        "fuse_wgrad_accumulation": False,
        "seq_length": None,
        "micro_batch_size": None,
        "sequence_parallel": False,
        "apply_residual_connection_post_layernorm": False,
        "output_layernorm": False,
        "parallel_attention_mlp": False,
        "layer_type": "encoder",
        "drop_path_rate": 0.0,
        "set_parallel_mode": False,
        "fuse_qkv_params": False,
        "rotary_pos_interleaved": False,
        "zero_centered_gamma": False,
        "qkv_weight_interleaved": True,
        "ub_tp_comm_overlap": False,
        "ub_overlap_ag": True,
        "ub_overlap_rs": True,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": True,
        "ub_bulk_wgrad": True,
        "bias": True,
        "activation": "gelu",
        "activation_params": None,
        "normalization": "LayerNorm",
        "device": None,
        "attn_input_format": "sbhd",
        "name": None,
        "qk_norm_type": None,
        "qk_norm_eps": 1e-6,
        "qk_norm_before_rope": False,
        "softmax_type": "vanilla",
    },
    {
        "hidden_states": NEEDED,
        "attention_mask": None,
        "self_attn_mask_type": None,
        "window_size": None,
        "bottom_right_diagonal": None,
        "encoder_output": None,
        "enc_dec_attn_mask": None,
        "enc_dec_attn_mask_type": None,
        "enc_dec_window_size": None,
        "enc_dec_bottom_right_diagonal": None,
        "is_first_microbatch": None,
        "checkpoint_core_attention": False,
        "inference_params": None,
        "rotary_pos_emb": None,
        "core_attention_bias_type": "no_bias",
        "core_attention_bias": None,
        "alibi_slopes": None,
        **dict.fromkeys(PACKING),
        "fast_zero_fill": True,
        "pad_between_seqs": None,
    },
    {
        "tp_group": object(),
        "tp_size": 2,
        "sequence_parallel": True,
        "set_parallel_mode": True,
        "ub_tp_comm_overlap": True,
    },
    COMMON_WRONG
    | {
        "layernorm_epsilon": "small",
        "hidden_dropout": 1.0,
        "attention_dropout": -0.1,
        "num_attention_heads": 5,
        "num_gqa_groups": 3,
        "kv_channels": 0,
        "self_attn_mask_type": "diagonal",
        "attn_input_format": "hbsd",
        "layer_type": "both",
        "activation": "tanh",
        "activation_params": {"beta": 1.0},
        "layer_number": 0,
        "fuse_wgrad_accumulation": True,  # without fuse_qkv_params
        "output_layernorm": "no",
        "parallel_attention_mlp": "no",
        "drop_path_rate": 1.0,
        "window_size": 4,
        "bottom_right_diagonal": True,  # which a causal mask type excludes
        "enc_dec_attn_mask_type": "padding",  # without a decoder
        "enc_dec_window_size": (4, 4),
        "enc_dec_bottom_right_diagonal": True,
        "qk_norm_type": "BatchNorm",
        "qk_norm_eps": -1.0,
        "qk_norm_before_rope": None,
        "softmax_type": "hard",
        "seq_length": 0,
        "micro_batch_size": 2.0,
        **dict.fromkeys(OVERLAP, 1),
    },
)
