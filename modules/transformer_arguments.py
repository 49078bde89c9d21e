"""Arguments of TransformerLayer: those of later features, and what the rest must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.activation_stage import check_activation
from te_hal.modules.arguments import check_callable, check_dtype, check_epsilon, check_size, refuse_later
from te_hal.modules.attention.layout import check_format
from te_hal.modules.attention.masks import mask_type
from te_hal.modules.attention.multihead_arguments import head_layout
from te_hal.modules.attention.sizes import check_probability
from te_hal.modules.device import parameter_device
from te_hal.modules.norm_parameters import norm_op
from te_hal.schema.errors import ArgumentError, UnsupportedError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Arguments of later features.
_CONSTRUCTOR: dict[str, object] = {
    "window_size": None,
    "bottom_right_diagonal": None,
    "enc_dec_attn_mask_type": "no_mask",
    "enc_dec_bottom_right_diagonal": None,
    "enc_dec_window_size": None,
    "tp_group": None,
    "tp_size": 1,
    "seq_length": None,
    "micro_batch_size": None,
    "sequence_parallel": False,
    "parallel_attention_mlp": False,
    "drop_path_rate": 0.0,
    "set_parallel_mode": False,
    "ub_tp_comm_overlap": False,
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "qk_norm_type": None,
    "qk_norm_eps": 1e-6,
    "qk_norm_before_rope": False,
    "softmax_type": "vanilla",
}
_FORWARD: dict[str, object] = {
    "window_size": None,
    "bottom_right_diagonal": None,
    "encoder_output": None,
    "enc_dec_attn_mask": None,
    "enc_dec_attn_mask_type": None,
    "enc_dec_window_size": None,
    "enc_dec_bottom_right_diagonal": None,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "fast_zero_fill": True,
    "pad_between_seqs": None,
}

_FLAGS = (
    "apply_residual_connection_post_layernorm",
    "output_layernorm",
    "fuse_qkv_params",
    "rotary_pos_interleaved",
    "zero_centered_gamma",
    "qkv_weight_interleaved",
    "fuse_wgrad_accumulation",
    "bias",
)

#: Arguments that attention and MLP take under the same name.
_SHARED = (
    *("hidden_size", "init_method", "output_layer_init_method", "fuse_wgrad_accumulation", "get_rng_state_tracker"),
    *("params_dtype", "zero_centered_gamma", "bias", "normalization", "device"),
)
_OF_ATTENTION = (
    *("num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "layer_number"),
    *("num_gqa_groups", "fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved"),
)


def attention_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What MultiheadAttention is made with, but for its name, from the layer's arguments."""
    first_norm = not given["output_layernorm"]
    return {name: given[name] for name in _SHARED + _OF_ATTENTION} | {
        "attn_mask_type": given["self_attn_mask_type"],
        "qkv_format": given["attn_input_format"],
        "input_layernorm": first_norm,
        "return_layernorm_output": first_norm and given["apply_residual_connection_post_layernorm"],
        "return_bias": True,
    }


def mlp_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What LayerNormMLP is made with, but for its name, from the layer's arguments."""
    return {name: given[name] for name in (*_SHARED, "ffn_hidden_size", "activation", "activation_params")} | {
        "eps": given["layernorm_epsilon"],
        "return_layernorm_output": given["apply_residual_connection_post_layernorm"],
        "return_bias": True,
    }


def check_constructor(kind: str, given: Mapping[str, object]) -> None:
    """Refuse what is of a later feature, or cannot be, naming the argument as TransformerLayer has it.

    Args:
        kind: the class, for messages.
        given: all arguments by name.

    Raises:
        UnsupportedError: of a later feature.
        ArgumentError: anything else that does not fit.
    """
    refuse_later(kind, given, _CONSTRUCTOR)
    check_flags(kind, {flag: given[flag] for flag in _FLAGS})
    _check_layer_type(kind, given["layer_type"])
    if given["fuse_wgrad_accumulation"] and not given["fuse_qkv_params"]:
        raise ArgumentError(
            f"{kind}: fuse_wgrad_accumulation",
            got="True with fuse_qkv_params=False",
            accepted="fuse_qkv_params=True: a gradient is written into one main_grad",
            todo="set both",
        )
    for name in ("init_method", "output_layer_init_method", "get_rng_state_tracker"):
        check_callable(f"{kind}: {name}", given[name])
    check_epsilon(f"{kind}: layernorm_epsilon", given["layernorm_epsilon"])
    check_dtype(f"{kind}: params_dtype", given["params_dtype"])
    parameter_device(given["device"], f"{kind}: device")  # type: ignore[arg-type] # what is none is refused
    for name in ("hidden_dropout", "attention_dropout"):
        check_probability(f"{kind}: {name}", given[name])
    mask_type(f"{kind}: self_attn_mask_type", given["self_attn_mask_type"])
    check_format(f"{kind}: attn_input_format", given["attn_input_format"])
    norm_op(kind, given["normalization"])
    check_activation(kind, given["activation"], given["activation_params"])
    hidden_size = check_size(f"{kind}: hidden_size", given["hidden_size"])
    check_size(f"{kind}: ffn_hidden_size", given["ffn_hidden_size"])
    heads, groups, channels = (given[name] for name in ("num_attention_heads", "num_gqa_groups", "kv_channels"))
    head_layout(kind, hidden_size, heads, groups, channels, interleaved=False)
    if given["layer_number"] is not None:
        check_size(f"{kind}: layer_number", given["layer_number"])


def check_forward(where: str, given: Mapping[str, object]) -> None:
    """Accept arguments of later features at their default only.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    refuse_later(where, given, _FORWARD)


def _check_layer_type(kind: str, layer_type: object) -> None:
    if layer_type == "decoder":
        raise UnsupportedError(
            f"{kind}: layer_type",
            got="'decoder'",
            accepted="'encoder'",
            todo="a layer with attention to an encoder's output is not built yet",
        )
    if layer_type != "encoder":
        raise ArgumentError(f"{kind}: layer_type", got=repr(layer_type), accepted="'encoder'", todo="correct it")
