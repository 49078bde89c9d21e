"""MultiheadAttention: projections to queries, keys and values, attention, and a projection back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.arguments import check_callable, check_prepared_sizes, check_size
from te_hal.modules.attention.dot_product_attention import DotProductAttention
from te_hal.modules.attention.generated_cross import without_cache
from te_hal.modules.attention.later import refuse_later_attention, refuse_later_settings
from te_hal.modules.attention.layout import check_format
from te_hal.modules.attention.multihead_arguments import FLAGS, check_inputs, check_together, head_layout
from te_hal.modules.attention.qk_norm import check_qk_norm, make_norms
from te_hal.modules.attention.rotated import rotated
from te_hal.modules.attention.sizes import check_attention_type
from te_hal.modules.inference.row_padding import in_padded_rows
from te_hal.modules.label import Labelled
from te_hal.modules.layernorm_linear import LayerNormLinear
from te_hal.modules.linear import Linear
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.inference import InferenceParams

#: Arguments that its parts take under the same name.
_OF_PROJECTIONS = ("fuse_wgrad_accumulation", "get_rng_state_tracker", "bias", "params_dtype", "device")
_OF_NORM = ("normalization", "zero_centered_gamma", "return_layernorm_output")
_OF_ATTENTION = (
    *("num_attention_heads", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type"),
    *("get_rng_state_tracker", "layer_number", "attention_type", "window_size", "bottom_right_diagonal"),
    "softmax_type",
)

#: Names that a CustomRecipe's factory sees, by attribute.
_ROLE_NAMES = {
    "qkv": "linear_qkv",
    "layernorm_qkv": "layernorm_linear_qkv",
    "query_layer": "linear_q",
    "layernorm_query": "layernorm_linear_q",
}

#: Arguments of a call that attention takes under the same name.
_TO_ATTENTION = (
    *("attention_mask", "attn_mask_type", "window_size", "bottom_right_diagonal", "checkpoint_core_attention"),
    *("inference_params", "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "fast_zero_fill"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs"),
)


class MultiheadAttention(Labelled, torch.nn.Module):
    """Multi-head attention with Transformer Engine's arguments, defaults, parameter names and shapes.

    Args:
        hidden_size: last size of input and output.
        num_attention_heads: heads of the queries.
        kv_channels: channels of a head; None: hidden_size / num_attention_heads.
        attention_dropout: share of probabilities dropped in training mode.
        layernorm_epsilon: of the norm before the projections.
        init_method: fills the weights of the projections to queries, keys and values in place; None: normal, mean 0,
            deviation 0.023.
        output_layer_init_method: the same for the projection back.
        layer_number: position in the model, from 1: which cache of ``inference_params`` is its own.
        attn_mask_type, window_size, bottom_right_diagonal, softmax_type: as in DotProductAttention.
        num_gqa_groups: heads of keys and values; None: as many as queries have.
        fuse_wgrad_accumulation: as in Linear; needs ``fuse_qkv_params``.
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised and dropout draws.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        return_bias: do not add the last bias but return it.
        return_layernorm_output: also return what the norm gave; needs ``input_layernorm``.
        input_layernorm: normalise the input first, in one module with the projection.
        attention_type: "self", or "cross": keys and values come from ``encoder_output``.
        fuse_qkv_params: one weight for queries, keys and values (cross: one for keys and values).
        zero_centered_gamma: as in LayerNorm.
        qkv_weight_interleaved: how a fused weight's rows are ordered: group after group (its queries, its key, its
            value), or all queries, all keys, all values. Means nothing without ``fuse_qkv_params``.
        rotary_pos_interleaved: which channels rotary embedding takes as a pair (see apply_rotary_pos_emb).
        bias: projections have biases.
        normalization: "LayerNorm" or "RMSNorm".
        device: None: the current backend's.
        qkv_format: "sbhd" (``[s, b, hidden_size]``), "bshd" (``[b, s, hidden_size]``) or "thd" (``[t, hidden_size]``).
        name: for messages.
        qk_norm_type: norm of queries and keys over the channels of each head: "RMSNorm" or "LayerNorm", with parameters
            that all heads share, "L2Normalization", without, or None.
        qk_norm_eps: added under its root.
        qk_norm_before_rope: it comes before rotary embedding instead of after.
        seq_length, micro_batch_size: accepted, for callers written for Transformer Engine; here nothing is prepared for
            them.
        tp_group, tp_size, sequence_parallel, set_parallel_mode, ub_bulk_wgrad, ub_bulk_dgrad, ub_overlap_rs_dgrad,
            ub_overlap_rs, ub_overlap_ag: of later features; anything but the default is refused by name.

    Attributes:
        core_attention: the DotProductAttention.
        qkv, layernorm_qkv, query_layer, layernorm_query, key_value, proj: the projections, as far as there are.
        q_norm, k_norm: the norms of queries and keys, or None.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: head counts that do not divide; arguments that contradict each other; an unknown type.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: object = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        kind = type(self).__name__
        given = dict(locals())
        refuse_later_settings(kind, given)
        check_flags(kind, {flag: given[flag] for flag in FLAGS})
        check_together(kind, given)
        check_callable(f"{kind}: get_rng_state_tracker", get_rng_state_tracker)
        check_qk_norm(kind, qk_norm_type, qk_norm_eps)
        check_prepared_sizes(kind, seq_length, micro_batch_size)
        super().__init__()
        self.name = name
        self.hidden_size = check_size(f"{kind}: hidden_size", hidden_size)
        self.qkv_format = check_format(f"{kind}: qkv_format", qkv_format)
        self.attention_type = check_attention_type(kind, attention_type)
        self.return_bias, self.input_layernorm = return_bias, input_layernorm
        self.return_layernorm_output = return_layernorm_output
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.head_layout = head_layout(
            kind,
            hidden_size,
            num_attention_heads,
            num_gqa_groups,
            kv_channels,
            fuse_qkv_params and qkv_weight_interleaved,
        )
        shared = {name: given[name] for name in _OF_PROJECTIONS}
        norm = {"eps": layernorm_epsilon} | {name: given[name] for name in _OF_NORM} if input_layernorm else None
        self._make_projections({**shared, "init_method": init_method}, norm, fused=fuse_qkv_params)
        self.proj = Linear(
            self.head_layout.query_size,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            name=self._name_of("proj"),
            **shared,
        )
        self._make_core(given)
        self.qk_norm_before_rope = qk_norm_before_rope
        channels = self.head_layout.channels
        self.q_norm, self.k_norm = make_norms(qk_norm_type, channels, qk_norm_eps, params_dtype, device)

    def _make_core(self, given: dict[str, Any]) -> None:
        self.core_attention = DotProductAttention(
            kv_channels=self.head_layout.channels,
            name=self._name_of("core_attention"),
            **{name: given[name] for name in _OF_ATTENTION},
        )
        if given["device"] is not None:
            self.core_attention.to(given["device"])  # a softmax_offset

    def _make_projections(self, arguments: dict[str, Any], norm: dict[str, Any] | None, *, fused: bool) -> None:
        """The projections before attention, under Transformer Engine's names."""
        layout = self.head_layout
        parts = {"query": layout.query_size, "key": layout.key_size, "value": layout.key_size}
        if self.attention_type == "self":
            name, split = "qkv", None if fused else parts
            rows = sum(parts.values())
        else:
            self.key_value = Linear(
                self.hidden_size,
                2 * layout.key_size,
                parameters_split=None if fused else {part: parts[part] for part in ("key", "value")},
                name=self._name_of("linear_kv"),
                **arguments,
            )
            name, rows = "query" if norm else "query_layer", layout.query_size
            split = {"query": rows} if norm and not fused else None  # query_layer is never split
        self._first_projection = f"layernorm_{name}" if norm else name
        arguments = {**arguments, "parameters_split": split, "name": self._name_of(_ROLE_NAMES[self._first_projection])}
        self.add_module(
            self._first_projection,
            LayerNormLinear(self.hidden_size, rows, **arguments, **norm)
            if norm
            else Linear(self.hidden_size, rows, **arguments),
        )

    def _name_of(self, part: str) -> str | None:
        return None if self.name is None else f"{self.name}.{part}"

    @run_eagerly
    def forward(  # noqa: D417 - what attention takes is named together
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attend.

        Args:
            hidden_states: ``[s, b, hidden_size]``, ``[b, s, hidden_size]`` or ``[t, hidden_size]`` by ``qkv_format``.
            encoder_output: what keys and values come from, for "cross" only; in the same format.
            is_first_microbatch: as in Linear.
            inference_params: as in DotProductAttention. Rotary embedding then starts at each sequence's own position,
                and under FP8 rows are padded to the number that it takes, for the projections alone. Cross attention
                keeps nothing in the cache, and refuses what depends on the positions of queries.
            rotary_pos_emb: angles (RotaryPositionEmbedding) that queries and keys are rotated by; a pair where those of
                queries and keys differ. Packed sequences each start at the first angle.
            attention_mask, attn_mask_type, window_size, bottom_right_diagonal, core_attention_bias_type,
                core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs,
                checkpoint_core_attention: as DotProductAttention takes them.

        Returns:
            The output in hidden_states' shape. With ``return_bias`` or ``return_layernorm_output`` a tuple: output,
            then bias, then what the norm gave.

        Raises:
            TeHalError: as Linear and DotProductAttention; ArgumentError also for an ``encoder_output`` that is missing
                or too much.
        """
        given = dict(locals())
        refuse_later_attention(self.label, given)
        check_inputs(self, hidden_states, encoder_output, rotary_pos_emb)
        cached = inference_params is not None
        to_attention = given
        if cached and encoder_output is not None:
            to_attention = without_cache(self.core_attention, self.label, given)
        first = getattr(self, self._first_projection)
        found = _project(first, hidden_states, is_first_microbatch, cached=cached)
        projected, normalised = found if self.return_layernorm_output else (found, None)
        if encoder_output is None:
            query, key, value = self.head_layout.query_key_value(projected)
        else:
            query = self.head_layout.query(projected)
            mixed = _project(self.key_value, encoder_output, is_first_microbatch, cached=cached)
            key, value = self.head_layout.key_value(mixed)
        query, key = self._positioned(query, key, given)
        context = self.core_attention(query, key, value, **{name: to_attention[name] for name in _TO_ATTENTION})
        output = _project(self.proj, context, is_first_microbatch, cached=cached)
        results = (*output,) if self.return_bias else (output,)
        if normalised is not None:
            results += (normalised,)
        return results if len(results) > 1 else results[0]

    def _positioned(
        self, query: torch.Tensor, key: torch.Tensor, given: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, normalised and rotated as far as is asked for."""
        if self.qk_norm_before_rope:
            query, key = self._normalised(query, key)
        if given["rotary_pos_emb"] is not None:
            query, key = rotated(query, key, given, qkv_format=self.qkv_format, interleaved=self.rotary_pos_interleaved)
        return (query, key) if self.qk_norm_before_rope else self._normalised(query, key)

    def _normalised(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)


def _project(layer: Any, inp: torch.Tensor, first: bool | None, *, cached: bool) -> Any:  # noqa: ANN401 - as returned
    """A projection; in generation the rows that FP8 takes are made up to."""
    if cached:
        return in_padded_rows(layer, inp, is_first_microbatch=first)
    return layer(inp, is_first_microbatch=first)
