"""DotProductAttention: softmax(q k^T scale) v, under Transformer Engine's arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_hal.modules.arguments import check_callable, check_size
from te_hal.modules.attention.call import attention_call, operands
from te_hal.modules.attention.choice import AttentionKey, AttentionPlan, make_plan
from te_hal.modules.attention.execution import run
from te_hal.modules.attention.later import refuse_later_attention, refuse_later_settings
from te_hal.modules.attention.layout import check_format
from te_hal.modules.attention.masks import mask_type
from te_hal.modules.attention.sizes import (
    check_attention_type,
    check_groups,
    check_probability,
    check_scale,
    head_channels,
)
from te_hal.modules.attention.softmax_type import LEARNABLE, VANILLA, check_softmax_type
from te_hal.modules.attention.visibility import check_window, is_bottom_right
from te_hal.modules.attention.with_cache import attention_with_cache
from te_hal.modules.device import make_real, parameter_device
from te_hal.modules.label import Labelled
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.recompute import recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.modules.transforms import refuse_transforms, run_eagerly
from te_hal.quantization.autocast import note_module
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.attention.call import AttentionCall
    from te_hal.modules.attention.choice import Choice
    from te_hal.modules.inference import InferenceParams

_FLAGS = ("fast_zero_fill", "checkpoint_core_attention")


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
        qkv_format: "sbhd", "bshd", or "thd": the tokens of all sequences in one row.
        attn_mask_type: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: how many keys left and right of its own place a query sees, -1 for all, what the mask type hides
            aside; None: (-1, 0) under a causal mask type, else (-1, -1).
        bottom_right_diagonal: whether a query's own place, for windows and ALiBi, is counted from the last key instead
            of the first; None: as a causal mask type says, else True.
        get_rng_state_tracker: gives the RNG tracker under whose fork dropout draws; None: it draws outside of any.
        layer_number: position in the model, from 1: which cache of ``inference_params`` is its own.
        attention_type: "self": packed keys have the queries' sequences where nothing else is said; or "cross".
        softmax_scale: of the scores, positive; None: 1 / sqrt(channels of a query head).
        softmax_type: "vanilla"; "off-by-one": 1 joins the sum under the softmax; "learnable": exp(softmax_offset) does.
        return_max_logit: also return the largest score of each head.
        name: for messages.
        sequence_parallel, tp_size, tp_group, cp_group, cp_global_ranks, cp_stream, cp_comm_type: of later features;
            anything but the default is refused by name.

    Attributes:
        always_written_out: set it to have attention written out whatever torch can do, for comparison.
        softmax_offset: ``[num_attention_heads]``, fp32: with "learnable" a parameter that starts at 0, with
            "off-by-one" zeros, else None.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: head counts that do not divide, an unknown mask, softmax or attention type or format, a window
            that is none or contradicts the mask type, a probability outside [0, 1).
    """

    softmax_offset: torch.Tensor | None

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
        refuse_later_settings(kind, locals())
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
        check_window(kind, window_size, self.attn_mask_type)
        self.window_size = None if window_size is None else (window_size[0], window_size[1])
        is_bottom_right(kind, bottom_right_diagonal, self.attn_mask_type, standing=None)
        self.bottom_right_diagonal = bottom_right_diagonal
        check_flags(kind, {"return_max_logit": return_max_logit})
        self.return_max_logit = return_max_logit
        self.softmax_type = check_softmax_type(kind, softmax_type)
        self._make_offset()
        self.always_written_out = False
        self._plans: PlanCache[AttentionKey, AttentionPlan] = PlanCache(make_plan)

    def _make_offset(self) -> None:
        if self.softmax_type == VANILLA:
            self.softmax_offset = None
            return
        zeros = torch.zeros(self.num_attention_heads, dtype=torch.float32, device=parameter_device(None))
        if self.softmax_type == LEARNABLE:
            self.softmax_offset = torch.nn.Parameter(zeros)
        else:
            self.register_buffer("softmax_offset", zeros, persistent=False)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill ``softmax_offset``, where there is one, with what it starts with, in place.

        Args:
            defer_init: on ``meta`` it stays there. Otherwise it gets memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        if self.softmax_offset is not None:
            torch.nn.init.zeros_(self.softmax_offset)

    @run_eagerly
    @recomputable
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
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool = False,
        num_splits: int = 1,
        score_mod: object = None,
        score_mod_bprop: object = None,
        score_mod_tensors: object = None,
        score_mod_bprop_tensors: object = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            query_layer: ``[sq, b, h, d]`` ("sbhd"), ``[b, sq, h, d]`` ("bshd") or ``[t, h, d]`` ("thd"), with h heads
                of d channels.
            key_layer: the same for keys, with g = num_gqa_groups heads.
            value_layer: the same, with the channels of values.
            attention_mask: bool, True hides. Under "padding", "padding_causal" and "padding_causal_bottom_right"
                ``[b, 1, 1, s]``, where True marks a token that is none: it is seen by nobody, and its own result is 0;
                two of them, of queries and keys, where these differ. Under "arbitrary" any shape that broadcasts to
                ``[b, h, sq, sk]``. Else None, or a mask that hides nothing but what the mask type hides.
            qkv_format: for this call; None: the module's.
            cu_seqlens_q: int32 or int64 ``[b + 1]``, 0 and then the sum of the sequences' lengths up to each. Needed
                for packed sequences; else, with a padding mask type, in the place of a mask: tokens lie at the front.
            cu_seqlens_kv: the same for keys; None in self-attention: the queries'.
            cu_seqlens_q_padded: where each packed sequence begins in memory; None: behind the one before.
            cu_seqlens_kv_padded: the same for keys.
            max_seqlen_q: of packed sequences, at least the longest length; None: read from the lengths, for which the
                device is waited for. Else the rows' length or None.
            max_seqlen_kv: the same for keys.
            attn_mask_type: for this call; None: the module's. For packed sequences, and with ``inference_params``,
                "no_mask" and "causal" mean "padding" and "padding_causal".
            window_size: for this call; None: the module's.
            bottom_right_diagonal: for this call; None: the module's, where the mask type leaves it open.
            core_attention_bias_type: "no_bias"; "pre_scale_bias": the bias is added before the scale;
                "post_scale_bias": after it; "alibi": -slope * distance is, from a query's own place to the key.
            core_attention_bias: of the middle two: fp32, fp16 or bf16, four sizes, each 1 or that of
                ``[b, h, sq, sk]``; may need a gradient.
            alibi_slopes: fp32 ``[h]`` or ``[b, h]``; None: those of the ALiBi paper.
            fast_zero_fill: accepted, for callers written for Transformer Engine: both values give 0 where there is no
                token.
            inference_params: the cache of keys and values (te.InferenceParams), of which ``layer_number`` says the
                layer. New keys and values are written to it, and queries see the whole of their sequence; a causal
                mask is aligned at its end.
            pad_between_seqs: of packed sequences, whether there are gaps; None: as ``cu_seqlens_q_padded`` says.
            qkv_layer: queries, keys and values in one tensor, in their place; as many heads each.
            kv_layer: keys and values in one, in their place.
            qkv_interleave_dim: where the parts of those lie: -3, before heads and channels, or -2, between them.
            checkpoint_core_attention: keep queries, keys and values alone; the backward attends again
                (docs/recompute.md).
            fp8_output, bf16_backward, num_splits, score_mod, score_mod_bprop, score_mod_tensors,
                score_mod_bprop_tensors: anything but the default is refused by name, with the reason.

        Returns:
            ``[sq, b, h * dv]``, ``[b, sq, h * dv]`` or ``[t, h * dv]`` in the activation dtype. A query with nothing to
            see gives 0, and so do its gradients. With ``return_max_logit`` a pair, the largest score ``[h]`` second: of
            those that are seen, scaled, with its bias, fp32, without a gradient; -inf where there is none.

        Raises:
            ArgumentTypeError: queries, keys or values are no tensors.
            ArgumentError: shapes, dtypes, devices or lengths that do not fit; a mask that does not fit its type;
                arguments that contradict each other, or that nothing would read.
            StateError: ``inference_params`` awaits no tokens.
            UnsupportedError: an argument of a later feature; the backend lacks the softmax that is needed.
        """
        call = self._call({name: value for name, value in locals().items() if value is not None})
        plan = self._plans.get(call.key_of_plan)
        recomputes = checkpoint_core_attention and torch.is_grad_enabled()
        output, largest = self._recomputed(call, plan) if recomputes else self._attended(call, plan)
        return output if largest is None else (output, largest)

    def _attended(self, call: AttentionCall, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        dropout = self.attention_dropout if self.training else 0.0
        with forked(self.get_rng_state_tracker if dropout else None):
            return run(call, plan, self.softmax_offset, scale=self.softmax_scale, dropout=dropout)

    def _recomputed(self, call: AttentionCall, plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, keeping queries, keys and values alone; the backward attends again."""
        nothing = call.query.new_empty(0)
        rest = call._replace(query=nothing, key=nothing, value=nothing)  # which must not keep them alive

        def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:  # noqa: ANN401 - as above
            return self._attended(rest._replace(query=query, key=key, value=value), plan)

        found: tuple[torch.Tensor, torch.Tensor | None] = torch_checkpoint(
            attended, call.query, call.key, call.value, use_reentrant=False
        )
        return found

    def choice(self, *tensors: Any, **arguments: Any) -> Choice:  # noqa: ANN401 - of forward
        """What :meth:`forward` would run for these arguments, and why. Launches no attention.

        Args:
            tensors: arguments of :meth:`forward` by place.
            arguments: by name; not ``inference_params``, whose cache a call changes.

        Raises:
            TypeError: an argument that :meth:`forward` does not have.
            TeHalError: as :meth:`forward`.
        """
        given = inspect.signature(self.forward).bind(*tensors, **arguments).arguments
        if given.get("inference_params") is not None:
            raise ArgumentError(
                f"{self.label}.choice: inference_params",
                got="a cache, which a call would change",
                accepted="None",
                todo="ask for the queries, and for keys and values as the cache holds them",
            )
        call = self._call({name: value for name, value in given.items() if value is not None})
        return self._plans.get(call.key_of_plan).choice

    def _call(self, given: dict[str, Any]) -> AttentionCall:
        """Check the arguments, those that are None left out; with ``inference_params``, write to the cache."""
        label = self.label
        refuse_later_attention(label, given)
        check_flags(label, {name: given[name] for name in _FLAGS if name in given})
        note_module()
        refuse_transforms(label)
        if "inference_params" in given:
            return attention_with_cache(self, label, given)
        return attention_call(self, label, given, operands(self, label, given))

    def extra_repr(self) -> str:
        """Settings, for ``print(model)``."""
        more = "" if self.window_size is None else f", window_size={self.window_size}"
        more += "" if self.softmax_type == VANILLA else f", softmax_type={self.softmax_type!r}"
        return (
            f"{self.num_attention_heads} heads, {self.num_gqa_groups} groups, attn_mask_type={self.attn_mask_type!r}, "
            f"qkv_format={self.qkv_format!r}, attention_dropout={self.attention_dropout}{more}"
        )
