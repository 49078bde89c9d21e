"""DotProductAttention: softmax(q k^T scale) v, under Transformer Engine's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import check_callable, check_size
from te_hal.modules.attention import torch_kernels
from te_hal.modules.attention.choice import TORCH, AttentionKey, AttentionPlan, make_plan
from te_hal.modules.attention.later import refuse_later_attention
from te_hal.modules.attention.layout import check_format, heads_first, heads_merged
from te_hal.modules.attention.masks import RULES, hidden_keys, mask_type
from te_hal.modules.attention.sizes import (
    check_attention_type,
    check_groups,
    check_probability,
    check_scale,
    check_sizes,
    head_channels,
)
from te_hal.modules.attention.written_out import Settings, WrittenOut
from te_hal.modules.label import Labelled
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.rng_tracker import forked
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.modules.transforms import refuse_transforms, run_eagerly
from te_hal.quantization import QuantizedTensor
from te_hal.quantization.autocast import note_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.attention.choice import Choice


class DotProductAttention(Labelled, OptionalExtraState, torch.nn.Module):
    """Attention over queries, keys and values, with Transformer Engine's arguments and defaults.

    torch's scaled_dot_product_attention computes it where it computes the same thing; else it is written out around
    the backend's softmax. :meth:`choice` says which, and why (docs/attention.md). It runs in the activation dtype also
    under an FP8 recipe.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: channels of a head; a pair where those of keys (and queries) and values differ.
        num_gqa_groups: heads of keys and values, a divisor of ``num_attention_heads``: each serves as many query heads
            that follow one another. None: one each.
        attention_dropout: share of probabilities dropped in training mode.
        qkv_format: "sbhd" or "bshd".
        attn_mask_type: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal" or "arbitrary".
        get_rng_state_tracker: gives the RNG tracker under whose fork dropout draws; None: it draws outside of any.
        layer_number: position in the model, for messages; changes no number.
        attention_type: "self" or "cross"; changes no number.
        softmax_scale: of the scores, positive; None: 1 / sqrt(channels of a query head).
        name: for messages.
        window_size, bottom_right_diagonal, sequence_parallel, tp_size, tp_group, cp_group, cp_global_ranks, cp_stream,
            cp_comm_type, softmax_type, return_max_logit: of later features; anything but the default is refused by
            name.

    Attributes:
        always_written_out: set it to have attention written out whatever torch can do, for comparison.

    Raises:
        UnsupportedError: an argument of a later feature, or a mask type or format that is not here yet.
        ArgumentError: head counts that do not divide, an unknown mask type, format or attention type, a probability
            outside [0, 1).
    """

    #: Transformer Engine 1.6 and 1.7 had it there.
    former_extra_states = ("fused_attention._extra_state",)

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: object = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: object = None,
        cp_global_ranks: object = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        kind = type(self).__name__
        refuse_later_attention(kind, locals())
        super().__init__()
        self.name = name
        self.num_attention_heads = check_size(f"{kind}: num_attention_heads", num_attention_heads)
        self.num_gqa_groups = check_groups(kind, num_attention_heads, num_gqa_groups)
        self.key_channels, self.value_channels = head_channels(kind, kv_channels)
        self.attention_dropout = check_probability(f"{kind}: attention_dropout", attention_dropout)
        self.qkv_format = check_format(f"{kind}: qkv_format", qkv_format)
        self.attn_mask_type = mask_type(f"{kind}: attn_mask_type", attn_mask_type)
        check_callable(f"{kind}: get_rng_state_tracker", get_rng_state_tracker)
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = None if layer_number is None else check_size(f"{kind}: layer_number", layer_number)
        self.attention_type = check_attention_type(kind, attention_type)
        self.softmax_scale = check_scale(kind, softmax_scale, self.key_channels)
        self.always_written_out = False
        self._plans: PlanCache[AttentionKey, AttentionPlan] = PlanCache(make_plan)

    @run_eagerly
    def forward(  # noqa: D417 - arguments of later features are named together
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: object = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query_layer: ``[sq, b, h, d]`` ("sbhd") or ``[b, sq, h, d]`` ("bshd"), with h heads of d channels.
            key_layer: ``[sk, b, g, d]`` or ``[b, sk, g, d]``, with g = num_gqa_groups.
            value_layer: the same, with the channels of values.
            attention_mask: bool, True hides. Under "padding" and "padding_causal" ``[b, 1, 1, s]``, where True marks a
                token that is none: it is seen by nobody, and its own result is 0; two of them, of queries and keys,
                where these differ. Under "arbitrary" any shape that broadcasts to ``[b, h, sq, sk]``. Else None.
            qkv_format: for this call; None: the module's.
            attn_mask_type: for this call; None: the module's.
            cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
                window_size, bottom_right_diagonal, checkpoint_core_attention, core_attention_bias_type,
                core_attention_bias, alibi_slopes, fast_zero_fill, inference_params, pad_between_seqs, fp8_output,
                bf16_backward, num_splits, score_mod, qkv_layer, kv_layer, qkv_interleave_dim: of later features;
                anything but the default is refused by name.

        Returns:
            ``[sq, b, h * dv]`` or ``[b, sq, h * dv]`` in the activation dtype. A query with nothing to see gives 0, and
            so do its gradients.

        Raises:
            ArgumentTypeError: queries, keys or values are no tensors.
            ArgumentError: shapes, dtypes or devices that do not fit; a mask that does not fit its type.
            UnsupportedError: an argument of a later feature; the backend lacks the softmax that is needed.
        """
        refuse_later_attention(self.label, locals())
        tensors, mask, plan, chosen_format = self._prepare(
            (query_layer, key_layer, value_layer), attention_mask, qkv_format, attn_mask_type
        )
        query, key, value = tensors
        dropout = self.attention_dropout if self.training else 0.0
        with forked(self.get_rng_state_tracker if dropout else None):
            if plan.choice.implementation == TORCH:
                output = torch_kernels.attend(
                    query,
                    key,
                    value,
                    causal=plan.key.causal != "none",
                    scale=self.softmax_scale,
                    dropout=dropout,
                    kernels=plan.choice.kernels,
                )
            else:
                settings = Settings(self.softmax_scale, dropout)
                output = WrittenOut.apply(query, key, value, mask, plan, settings)  # type: ignore[no-untyped-call]
        return heads_merged(output, chosen_format)

    def choice(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
    ) -> Choice:
        """What :meth:`forward` would run for these arguments, and why. Launches nothing.

        Raises:
            TeHalError: as :meth:`forward`.
        """
        tensors = (query_layer, key_layer, value_layer)
        return self._prepare(tensors, attention_mask, qkv_format, attn_mask_type)[2].choice

    def _prepare(
        self, given: tuple[object, object, object], attention_mask: object, qkv_format: object, attn_mask_type: object
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None, AttentionPlan, str]:
        """Queries, keys and values as ``[b, h, s, d]`` in the activation dtype; hidden keys; the plan; the format."""
        label = self.label
        note_module()
        refuse_transforms(label)
        chosen_format = self.qkv_format if qkv_format is None else check_format(f"{label}: qkv_format", qkv_format)
        name = self.attn_mask_type if attn_mask_type is None else mask_type(f"{label}: attn_mask_type", attn_mask_type)
        query, key, value = check_sizes(label, given, chosen_format, self)
        dtype = activation_dtype(label, query, key=key, value=value)
        query, key, value = (_first(tensor, dtype, chosen_format) for tensor in (query, key, value))
        queries, keys = query.shape[2], key.shape[2]
        scores = (query.shape[0], query.shape[1], queries, keys)
        mask = hidden_keys(label, name, attention_mask, scores, query.device)
        plan = self._plans.get(
            AttentionKey(
                dtype,
                query.device,
                RULES[name].causal,
                mask is not None,
                queries == keys,
                0 in scores,
                self.always_written_out,
            )
        )
        return (query, key, value), mask, plan, chosen_format

    def extra_repr(self) -> str:
        """Settings, for ``print(model)``."""
        return (
            f"{self.num_attention_heads} heads, {self.num_gqa_groups} groups, attn_mask_type={self.attn_mask_type!r}, "
            f"qkv_format={self.qkv_format!r}, attention_dropout={self.attention_dropout}"
        )


def _first(tensor: torch.Tensor, dtype: torch.dtype, qkv_format: str) -> torch.Tensor:
    plain = tensor.dequantize(dtype=dtype) if isinstance(tensor, QuantizedTensor) else cast_if_needed(tensor, dtype)
    return heads_first(plain, qkv_format)
