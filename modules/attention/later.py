"""Arguments of Transformer Engine's attention modules whose feature is not built yet."""

from __future__ import annotations

from typing import Any

from te_hal.modules.arguments import refuse_later

#: Name to its default, and what it belongs to.
_LATER: dict[str, tuple[object, str]] = {
    "window_size": (None, "sliding-window attention"),
    "bottom_right_diagonal": (None, "another alignment of the causal mask than its type's"),
    "sequence_parallel": (False, "sequence parallelism"),
    "tp_size": (1, "tensor parallelism"),
    "tp_group": (None, "tensor parallelism"),
    "cp_group": (None, "context parallelism"),
    "cp_global_ranks": (None, "context parallelism"),
    "cp_stream": (None, "context parallelism"),
    "cp_comm_type": ("p2p", "context parallelism"),
    "set_parallel_mode": (False, "tensor parallelism"),
    "ub_bulk_wgrad": (False, "overlap of communication and gemm"),
    "ub_bulk_dgrad": (False, "overlap of communication and gemm"),
    "ub_overlap_rs_dgrad": (False, "overlap of communication and gemm"),
    "ub_overlap_rs": (False, "overlap of communication and gemm"),
    "ub_overlap_ag": (False, "overlap of communication and gemm"),
    "qk_norm_type": (None, "the normalisation of queries and keys"),
    "qk_norm_eps": (1e-6, "the normalisation of queries and keys"),
    "qk_norm_before_rope": (False, "the normalisation of queries and keys"),
    "seq_length": (None, "preparing kernels for a size"),
    "micro_batch_size": (None, "preparing kernels for a size"),
    "softmax_type": ("vanilla", "a softmax with an offset"),
    "return_max_logit": (False, "returning the largest score"),
    "cu_seqlens_q": (None, "the packing of sequences"),
    "cu_seqlens_kv": (None, "the packing of sequences"),
    "cu_seqlens_q_padded": (None, "the packing of sequences"),
    "cu_seqlens_kv_padded": (None, "the packing of sequences"),
    "max_seqlen_q": (None, "the packing of sequences"),
    "max_seqlen_kv": (None, "the packing of sequences"),
    "pad_between_seqs": (None, "the packing of sequences"),
    "checkpoint_core_attention": (False, "recompute of attention"),
    "core_attention_bias_type": ("no_bias", "attention with a bias"),
    "core_attention_bias": (None, "attention with a bias"),
    "alibi_slopes": (None, "ALiBi"),
    "fast_zero_fill": (True, "another way to fill outputs"),
    "inference_params": (None, "a cache of keys and values"),
    "fp8_output": (False, "FP8 attention"),
    "bf16_backward": (False, "FP8 attention"),
    "num_splits": (1, "splitting keys over several kernels"),
    "score_mod": (None, "a function of the scores"),
    "qkv_layer": (None, "the packing of queries, keys and values"),
    "kv_layer": (None, "the packing of keys and values"),
    "qkv_interleave_dim": (-3, "the packing of queries, keys and values"),
}


def refuse_later_attention(where: str, arguments: dict[str, Any]) -> None:
    """Accept arguments of later features, found among ``arguments`` by name, at their default only.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    for name, value in arguments.items():
        row = _LATER.get(name)
        if row is not None and value is not row[0]:
            refuse_later(where, {name: value}, {name: row[0]}, {name: row[1]})
