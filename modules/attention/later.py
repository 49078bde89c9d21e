"""Arguments of Transformer Engine's attention modules whose feature is not built yet."""

from __future__ import annotations

from typing import Any

from te_hal.modules.arguments import refuse_later

_DEFAULTS: dict[str, object] = {
    "window_size": None,
    "bottom_right_diagonal": None,
    "sequence_parallel": False,
    "tp_size": 1,
    "tp_group": None,
    "cp_group": None,
    "cp_global_ranks": None,
    "cp_stream": None,
    "cp_comm_type": "p2p",
    "set_parallel_mode": False,
    "ub_bulk_wgrad": False,
    "ub_bulk_dgrad": False,
    "ub_overlap_rs_dgrad": False,
    "ub_overlap_rs": False,
    "ub_overlap_ag": False,
    "qk_norm_type": None,
    "qk_norm_eps": 1e-6,
    "qk_norm_before_rope": False,
    "seq_length": None,
    "micro_batch_size": None,
    "softmax_type": "vanilla",
    "return_max_logit": False,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "pad_between_seqs": None,
    "checkpoint_core_attention": False,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "fast_zero_fill": True,
    "inference_params": None,
    "fp8_output": False,
    "bf16_backward": False,
    "num_splits": 1,
    "score_mod": None,
    "qkv_layer": None,
    "kv_layer": None,
    "qkv_interleave_dim": -3,
}


def refuse_later_attention(where: str, arguments: dict[str, Any]) -> None:
    """Accept arguments of later features, found among ``arguments`` by name, at their default only.

    Raises:
        UnsupportedError: one differs; names it and its feature.
    """
    refuse_later(where, arguments, _DEFAULTS)
