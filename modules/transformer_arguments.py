"""Arguments of TransformerLayer: those of later features, and what the rest must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

_OVERLAP = "the overlap of communication and gemm"
_TENSOR_PARALLEL = "tensor parallelism"
_ENCODER = "a layer with attention to an encoder's output"
_PACKING = "the packing of sequences"

#: Name to its default, and what it belongs to.
_CONSTRUCTOR: dict[str, tuple[object, str]] = {
    "window_size": (None, "sliding-window attention"),
    "bottom_right_diagonal": (None, "another alignment of the causal mask than its type's"),
    "enc_dec_attn_mask_type": ("no_mask", _ENCODER),
    "enc_dec_bottom_right_diagonal": (None, _ENCODER),
    "enc_dec_window_size": (None, _ENCODER),
    "tp_group": (None, _TENSOR_PARALLEL),
    "tp_size": (1, _TENSOR_PARALLEL),
    "seq_length": (None, "preparing kernels for a size"),
    "micro_batch_size": (None, "preparing kernels for a size"),
    "sequence_parallel": (False, "sequence parallelism"),
    "parallel_attention_mlp": (False, "attention and MLP side by side"),
    "drop_path_rate": (0.0, "drop path"),
    "set_parallel_mode": (False, _TENSOR_PARALLEL),
    "ub_tp_comm_overlap": (False, _OVERLAP),
    "ub_overlap_ag": (True, _OVERLAP),
    "ub_overlap_rs": (True, _OVERLAP),
    "ub_overlap_rs_dgrad": (False, _OVERLAP),
    "ub_bulk_dgrad": (True, _OVERLAP),
    "ub_bulk_wgrad": (True, _OVERLAP),
    "qk_norm_type": (None, "the normalisation of queries and keys"),
    "qk_norm_eps": (1e-6, "the normalisation of queries and keys"),
    "qk_norm_before_rope": (False, "the normalisation of queries and keys"),
    "softmax_type": ("vanilla", "a softmax with an offset"),
}
_FORWARD: dict[str, tuple[object, str]] = {
    "window_size": (None, "sliding-window attention"),
    "bottom_right_diagonal": (None, "another alignment of the causal mask than its type's"),
    "encoder_output": (None, _ENCODER),
    "enc_dec_attn_mask": (None, _ENCODER),
    "enc_dec_attn_mask_type": (None, _ENCODER),
    "enc_dec_window_size": (None, _ENCODER),
    "enc_dec_bottom_right_diagonal": (None, _ENCODER),
    "checkpoint_core_attention": (False, "recompute of attention"),
    "inference_params": (None, "a cache of keys and values"),
    "core_attention_bias_type": ("no_bias", "attention with a bias"),
    "core_attention_bias": (None, "attention with a bias"),
    "alibi_slopes": (None, "ALiBi"),
    "cu_seqlens_q": (None, _PACKING),
    "cu_seqlens_kv": (None, _PACKING),
    "cu_seqlens_q_padded": (None, _PACKING),
    "cu_seqlens_kv_padded": (None, _PACKING),
    "max_seqlen_q": (None, _PACKING),
    "max_seqlen_kv": (None, _PACKING),
    "fast_zero_fill": (True, "another way to fill outputs"),
    "pad_between_seqs": (None, _PACKING),
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


def check_constructor(kind: str, given: Mapping[str, object]) -> None:
    """Refuse what is of a later feature, or cannot be, naming the argument as TransformerLayer has it.

    Args:
        kind: the class, for messages.
        given: all arguments by name.

    Raises:
        UnsupportedError: of a later feature.
        ArgumentError: anything else that does not fit.
    """
    _refuse_later(kind, given, _CONSTRUCTOR)
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
    _refuse_later(where, given, _FORWARD)


def _refuse_later(where: str, given: Mapping[str, object], later: Mapping[str, tuple[object, str]]) -> None:
    for name, (default, feature) in later.items():
        if given[name] is not default:  # compared only then: a tensor has no single answer
            refuse_later(where, {name: given[name]}, {name: default}, {name: feature})


def _check_layer_type(kind: str, layer_type: object) -> None:
    if layer_type == "decoder":
        raise UnsupportedError(
            f"{kind}: layer_type", got="'decoder'", accepted="'encoder'", todo=f"{_ENCODER} is not built yet"
        )
    if layer_type != "encoder":
        raise ArgumentError(f"{kind}: layer_type", got=repr(layer_type), accepted="'encoder'", todo="correct it")
