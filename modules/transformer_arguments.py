"""Arguments of TransformerLayer: what they must be, and which of its parts gets which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.activation_stage import check_activation
from te_hal.modules.arguments import (
    REASONS,
    check_callable,
    check_dtype,
    check_epsilon,
    check_prepared_sizes,
    check_size,
)
from te_hal.modules.attention.layout import check_format
from te_hal.modules.attention.masks import mask_type
from te_hal.modules.attention.multihead_arguments import head_layout
from te_hal.modules.attention.qk_norm import check_qk_norm
from te_hal.modules.attention.sizes import check_probability
from te_hal.modules.attention.softmax_type import check_softmax_type
from te_hal.modules.attention.visibility import check_window, is_bottom_right
from te_hal.modules.device import parameter_device
from te_hal.modules.norm_parameters import norm_op
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Arguments of later features.
_REFUSED = declare(
    "TransformerLayer",
    {
        "tp_group": None,
        "tp_size": 1,
        "sequence_parallel": False,
        "set_parallel_mode": False,
        "ub_tp_comm_overlap": False,
    },
    REASONS,
)

#: Arguments of the attention to an encoder's output: under the layer's names, and under attention's.
_OF_INTER_ATTENTION = {
    "enc_dec_attn_mask_type": "attn_mask_type",
    "enc_dec_window_size": "window_size",
    "enc_dec_bottom_right_diagonal": "bottom_right_diagonal",
}
#: Their defaults, which a layer without that attention has.
_WITHOUT_ENCODER: dict[str, object] = {
    "enc_dec_attn_mask_type": "no_mask",
    "enc_dec_window_size": None,
    "enc_dec_bottom_right_diagonal": None,
}
_CALLED_WITHOUT_ENCODER = ("encoder_output", "enc_dec_attn_mask", *_OF_INTER_ATTENTION)

#: Of a call, what both attentions take under the same name.
_OF_BOTH = (
    *("is_first_microbatch", "checkpoint_core_attention", "rotary_pos_emb", "core_attention_bias_type"),
    *("core_attention_bias", "alibi_slopes", "fast_zero_fill", "pad_between_seqs"),
    *("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q"),
)
_OF_KEYS = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_kv")

_FLAGS = (
    "parallel_attention_mlp",
    "qk_norm_before_rope",
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
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
    *("qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "softmax_type"),
)


def attention_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the MultiheadAttention is made with, but for its name, from the layer's arguments."""
    first_norm = not given["output_layernorm"]
    return {name: given[name] for name in _SHARED + _OF_ATTENTION + ("window_size", "bottom_right_diagonal")} | {
        "attn_mask_type": given["self_attn_mask_type"],
        "qkv_format": given["attn_input_format"],
        "input_layernorm": first_norm,
        "return_layernorm_output": first_norm and given["apply_residual_connection_post_layernorm"],
        "return_bias": not given["parallel_attention_mlp"],
    }


def inter_attention_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the MultiheadAttention to an encoder's output."""
    own = {name: given[of_layer] for of_layer, name in _OF_INTER_ATTENTION.items()}
    return (
        {name: given[name] for name in _SHARED + _OF_ATTENTION}
        | own
        | {
            "qkv_format": given["attn_input_format"],
            "attention_type": "cross",
            "input_layernorm": True,
            "return_layernorm_output": given["apply_residual_connection_post_layernorm"],
            "return_bias": True,
        }
    )


def mlp_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What LayerNormMLP is made with, but for its name, from the layer's arguments."""
    return {name: given[name] for name in (*_SHARED, "ffn_hidden_size", "activation", "activation_params")} | {
        "eps": given["layernorm_epsilon"],
        "return_layernorm_output": given["apply_residual_connection_post_layernorm"],
        "return_bias": not given["parallel_attention_mlp"],
    }


def self_attention_call(given: Mapping[str, Any], *, decoder: bool) -> dict[str, Any]:
    """What a call passes on to self-attention, whose keys are the queries' tokens."""
    keys = (name.replace("_kv", "_q") if decoder else name for name in _OF_KEYS)
    return {name: given[name] for name in (*_OF_BOTH, "attention_mask", "inference_params")} | {
        "attn_mask_type": given["self_attn_mask_type"],
        "window_size": given["window_size"],
        "bottom_right_diagonal": given["bottom_right_diagonal"],
        **dict(zip(_OF_KEYS, (given[name] for name in keys), strict=True)),
    }


def inter_attention_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a call passes on to the attention to an encoder's output."""
    return {name: given[name] for name in (*_OF_BOTH, *_OF_KEYS, "encoder_output", "inference_params")} | {
        "attention_mask": given["enc_dec_attn_mask"],
        **{name: given[of_layer] for of_layer, name in _OF_INTER_ATTENTION.items()},
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
    refuse(kind, given, _REFUSED)
    check_flags(kind, {flag: given[flag] for flag in _FLAGS})
    _check_together(kind, given)
    for name in ("init_method", "output_layer_init_method", "get_rng_state_tracker"):
        check_callable(f"{kind}: {name}", given[name])
    check_epsilon(f"{kind}: layernorm_epsilon", given["layernorm_epsilon"])
    check_dtype(f"{kind}: params_dtype", given["params_dtype"])
    parameter_device(given["device"], f"{kind}: device")  # type: ignore[arg-type] # what is none is refused
    for name in ("hidden_dropout", "attention_dropout", "drop_path_rate"):
        check_probability(f"{kind}: {name}", given[name])
    for prefix, of_masks in (("", "self_attn_mask_type"), ("enc_dec_", "enc_dec_attn_mask_type")):
        chosen = mask_type(f"{kind}: {of_masks}", given[of_masks])
        where = kind if not prefix else f"{kind}: {prefix}*"
        check_window(where, given[f"{prefix}window_size"], chosen)
        is_bottom_right(where, given[f"{prefix}bottom_right_diagonal"], chosen, standing=None)
    check_qk_norm(kind, given["qk_norm_type"], given["qk_norm_eps"])
    check_softmax_type(kind, given["softmax_type"])
    check_format(f"{kind}: attn_input_format", given["attn_input_format"])
    norm_op(kind, given["normalization"])
    check_activation(kind, given["activation"], given["activation_params"])
    hidden_size = check_size(f"{kind}: hidden_size", given["hidden_size"])
    check_size(f"{kind}: ffn_hidden_size", given["ffn_hidden_size"])
    heads, groups, channels = (given[name] for name in ("num_attention_heads", "num_gqa_groups", "kv_channels"))
    head_layout(kind, hidden_size, heads, groups, channels, interleaved=False)
    check_prepared_sizes(kind, given["seq_length"], given["micro_batch_size"])
    if given["layer_number"] is not None:
        check_size(f"{kind}: layer_number", given["layer_number"])


def check_forward(where: str, given: Mapping[str, object], *, decoder: bool) -> None:
    """Refuse what nothing would read.

    Args:
        where: the layer, for messages.
        given: the arguments of its forward by name.
        decoder: it attends to an encoder's output.

    Raises:
        ArgumentError: an argument of that attention, where there is none.
    """
    for name in () if decoder else _CALLED_WITHOUT_ENCODER:
        if given[name] is not None:
            value = given[name]
            raise ArgumentError(
                f"{where}: {name}",
                got=f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value),
                accepted="None: this layer has no attention to an encoder's output",
                todo='make the layer with layer_type="decoder"',
            )


def _check_together(kind: str, given: Mapping[str, object]) -> None:
    """Refuse a type that is none, and arguments that exclude each other or that nothing would read."""
    layer_type = given["layer_type"]
    if layer_type not in ("encoder", "decoder"):
        raise ArgumentError(
            f"{kind}: layer_type", got=repr(layer_type), accepted="'encoder', 'decoder'", todo="correct it"
        )
    for name, default in _WITHOUT_ENCODER.items() if layer_type == "encoder" else ():
        if given[name] != default:
            raise ArgumentError(
                f"{kind}: {name}",
                got=f"{given[name]!r} with layer_type='encoder'",
                accepted=f"{default!r}: there is no attention to an encoder's output",
                todo="leave it out, or pass layer_type='decoder'",
            )
    excluded = ("apply_residual_connection_post_layernorm", "output_layernorm")
    clash = next((name for name in excluded if given[name]), "layer_type" if layer_type == "decoder" else None)
    if given["parallel_attention_mlp"] and clash is not None:
        raise ArgumentError(
            f"{kind}: parallel_attention_mlp",
            got=f"True with {clash}={given[clash]!r}",
            accepted="True for an encoder layer with a norm before attention and residuals of what that reads",
            todo="leave one of the two out",
        )
    if given["fuse_wgrad_accumulation"] and not given["fuse_qkv_params"]:
        raise ArgumentError(
            f"{kind}: fuse_wgrad_accumulation",
            got="True with fuse_qkv_params=False",
            accepted="fuse_qkv_params=True: a gradient is written into one main_grad",
            todo="set both",
        )
