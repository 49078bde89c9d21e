"""TransformerLayer: attention, to an encoder's output too, and an MLP, each behind a norm and added to what it read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.attention.multihead_attention import MultiheadAttention
from te_hal.modules.inference.row_padding import in_padded_rows
from te_hal.modules.label import Labelled
from te_hal.modules.layernorm import LayerNorm
from te_hal.modules.layernorm_mlp import LayerNormMLP
from te_hal.modules.residual import add_to_residual
from te_hal.modules.rmsnorm import RMSNorm
from te_hal.modules.transformer_arguments import (
    attention_arguments,
    check_constructor,
    check_forward,
    inter_attention_arguments,
    inter_attention_call,
    mlp_arguments,
    self_attention_call,
)
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from te_hal.modules.inference import InferenceParams
    from te_hal.modules.normalization import Normalization

_NORMS: dict[str, type[Normalization]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class TransformerLayer(Labelled, torch.nn.Module):
    """One layer of a transformer with Transformer Engine's arguments, defaults, parameter names and shapes.

    ``h = x + dropout(self_attention(norm(x)))``, ``y = h + dropout(layernorm_mlp(h))``; a decoder attends to an
    encoder's output in between, in the same way.

    Args:
        hidden_size: last size of input and output.
        ffn_hidden_size: size between the layers of the MLP.
        num_attention_heads: heads of the queries.
        num_gqa_groups: heads of keys and values; None: as many as queries have.
        layernorm_epsilon: added under the norms' roots.
        hidden_dropout: share of values dropped, in training mode, before each of the sums. It draws from torch's
            default generators, as Transformer Engine's does.
        attention_dropout: share of attention probabilities dropped in training mode.
        init_method: fills the weights that read hidden states (qkv, fc1) in place; None: normal, mean 0, deviation
            0.023.
        output_layer_init_method: the same for those that give them (proj, fc2).
        layer_number: position in the model, from 1: which cache of ``inference_params`` is its own; names the layer in
            messages where ``name`` does not.
        kv_channels: channels of a head; None: hidden_size / num_attention_heads.
        self_attn_mask_type: as DotProductAttention's ``attn_mask_type``.
        window_size, bottom_right_diagonal: as there, of self-attention.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the same of a decoder's attention to
            the encoder's output.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised and attention's dropout
            draws.
        fuse_wgrad_accumulation: put weight gradients into ``main_grad``; needs ``fuse_qkv_params``.
        apply_residual_connection_post_layernorm: add to what the norm gave instead of what it read.
        output_layernorm: no norm before attention, but one (``layernorm``) at the end; the sum behind attention is then
            with what attention read.
        parallel_attention_mlp: attention and MLP read the same: ``y = x + dropout(self_attention(norm(x)) +
            layernorm_mlp(x))``; for an encoder layer with neither of the two above.
        layer_type: "encoder", or "decoder": with attention to an encoder's output (``inter_attention``) behind
            self-attention.
        drop_path_rate: share of the indices of the input's dimension 0 (sequences under "bshd", positions under "sbhd",
            as in Transformer Engine) for which, in training mode, self-attention or MLP gives nothing; the rest is
            scaled up. It draws from torch's default generators.
        fuse_qkv_params: one weight for queries, keys and values.
        rotary_pos_interleaved: as in MultiheadAttention.
        zero_centered_gamma: gammas are stored minus one, start at 0, and the one is added in fp32.
        qkv_weight_interleaved: as in MultiheadAttention.
        bias: layers have biases.
        activation, activation_params: as in LayerNormMLP.
        normalization: "LayerNorm" or "RMSNorm".
        device: None: the current backend's.
        attn_input_format: "sbhd" (``[s, b, hidden_size]``), "bshd" (``[b, s, hidden_size]``) or "thd"
            (``[t, hidden_size]``: the tokens of all sequences in one row).
        name: for messages.
        qk_norm_type, qk_norm_eps, qk_norm_before_rope: as in MultiheadAttention, of both attentions.
        softmax_type: as in DotProductAttention, of both.
        seq_length, micro_batch_size: accepted, for callers written for Transformer Engine, which prepares kernels for
            these sizes; here nothing is prepared.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: which communication
            ``ub_tp_comm_overlap`` would overlap; mean nothing without it.
        tp_group, tp_size, sequence_parallel, set_parallel_mode, ub_tp_comm_overlap: of later features; anything but the
            default is refused by name.

    Attributes:
        self_attention: the MultiheadAttention.
        inter_attention: of a decoder, the one to the encoder's output.
        layernorm_mlp: the LayerNormMLP.
        layernorm: the norm at the end, with ``output_layernorm``.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: head counts that do not divide; an unknown activation, normalization, mask type or format; a
            probability outside [0, 1); a flag that is no bool; arguments that exclude each other, or that nothing
            would read.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: object = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        given = dict(locals())
        check_constructor(type(self).__name__, given)
        super().__init__()
        self.layer_number = layer_number
        self.name = f"layer_{layer_number}" if name is None and layer_number is not None else name
        self.hidden_size = hidden_size
        self.hidden_dropout = float(hidden_dropout)
        self.self_attn_mask_type, self.layer_type = self_attn_mask_type, layer_type
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp, self.drop_path_rate = parallel_attention_mlp, float(drop_path_rate)
        self.self_attention = MultiheadAttention(name=self._name_of("self_attention"), **attention_arguments(given))
        if layer_type == "decoder":
            name_of = self._name_of("inter_attention")
            self.inter_attention = MultiheadAttention(name=name_of, **inter_attention_arguments(given))
        self.layernorm_mlp = LayerNormMLP(name=self._name_of("layernorm_mlp"), **mlp_arguments(given))
        if output_layernorm:
            self.layernorm = _NORMS[normalization](
                hidden_size,
                eps=layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                dtype=params_dtype,
                device=device,
            )

    def _name_of(self, part: str) -> str | None:
        return None if self.name is None else f"{self.name}.{part}"

    @run_eagerly
    def forward(  # noqa: D417 - what attention takes is named together
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            hidden_states: ``[s, b, hidden_size]``, ``[b, s, hidden_size]`` or ``[t, hidden_size]`` by
                ``attn_input_format``.
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self-attention, as
                DotProductAttention takes them; None: the layer's.
            encoder_output: of a decoder: what its second attention takes keys and values from.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of that.
            is_first_microbatch: as in Linear.
            inference_params: the cache of keys and values of self-attention, of which ``layer_number`` says the layer.
                Under FP8 rows are padded to the number that products take, inside attention and MLP. A decoder
                projects the encoder's output anew at each step, and refuses masks, windows and biases of that attention
                that depend on the positions of queries.
            rotary_pos_emb: as in MultiheadAttention; of a decoder, as in Transformer Engine, of both attentions, and so
                are the next three.
            core_attention_bias_type, core_attention_bias, alibi_slopes: as in DotProductAttention.
            checkpoint_core_attention: each attention keeps queries, keys and values alone, and is computed again in the
                backward.
            cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of packed sequences, as in DotProductAttention.
            cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv: the same of keys; of a decoder those of the encoder's
                output, self-attention's being the queries'.
            fast_zero_fill, pad_between_seqs: as in DotProductAttention.

        Returns:
            The shape of ``hidden_states``.

        Raises:
            TeHalError: as MultiheadAttention and LayerNormMLP; ArgumentError also for what a layer that is no decoder
                would not read.
        """
        given, decoder = dict(locals()), self.layer_type == "decoder"
        check_forward(self.label, given, decoder=decoder)
        attended = self.self_attention(hidden_states, **self_attention_call(given, decoder=decoder))
        path = self.drop_path_rate if self.training else 0.0
        if self.parallel_attention_mlp:
            given_by_mlp = self._through_mlp(hidden_states, given)
            return self._added((attended + given_by_mlp,), hidden_states, path)
        between = self._added(attended, hidden_states, path)
        if decoder:
            between = self._added(self.inter_attention(between, **inter_attention_call(given)), between)
        output = self._added(self._through_mlp(between, given), between, path)
        return self.layernorm(output) if self.output_layernorm else output

    def _through_mlp(self, inp: torch.Tensor, given: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as LayerNormMLP returns
        first = given["is_first_microbatch"]
        if given["inference_params"] is None:
            return self.layernorm_mlp(inp, is_first_microbatch=first)
        return in_padded_rows(self.layernorm_mlp, inp, is_first_microbatch=first)

    def _added(self, given: tuple[torch.Tensor, ...], read: torch.Tensor, drop_path: float = 0.0) -> torch.Tensor:
        """What a part gave, after dropout, added to what it read, or to what its norm gave where that is returned."""
        result, bias, *normed = (*given, None) if len(given) == 1 else given
        dropout = self.hidden_dropout if self.training else 0.0
        residual = normed[0] if normed else read
        return add_to_residual(result, bias, residual, dropout=dropout, drop_path=drop_path)

    def extra_repr(self) -> str:
        """Settings, for ``print(model)``."""
        return f"hidden_dropout={self.hidden_dropout}, self_attn_mask_type={self.self_attn_mask_type!r}"
