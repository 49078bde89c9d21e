"""TransformerLayer: attention and an MLP, each behind a norm and added to what it read."""

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
    mlp_arguments,
)
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from te_hal.modules.inference import InferenceParams
    from te_hal.modules.normalization import Normalization

_NORMS: dict[str, type[Normalization]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


class TransformerLayer(Labelled, torch.nn.Module):
    """One layer of a transformer with Transformer Engine's arguments, defaults, parameter names and shapes.

    ``h = x + dropout(self_attention(norm(x)))``, ``y = h + dropout(layernorm_mlp(h))``.

    Args:
        hidden_size: last size of input and output.
        ffn_hidden_size: size between the layers of the MLP.
        num_attention_heads: heads of the queries.
        num_gqa_groups: heads of keys and values; None: as many as queries have.
        layernorm_epsilon: added under the norms' roots.
        hidden_dropout: share of values dropped, in training mode, before each of the two sums. It draws from torch's
            default generators, as Transformer Engine's does.
        attention_dropout: share of attention probabilities dropped in training mode.
        init_method: fills the weights that read hidden states (qkv, fc1) in place; None: normal, mean 0, deviation
            0.023.
        output_layer_init_method: the same for those that give them (proj, fc2).
        layer_number: position in the model, from 1; names the layer in messages where ``name`` does not.
        kv_channels: channels of a head; None: hidden_size / num_attention_heads.
        self_attn_mask_type: as DotProductAttention's ``attn_mask_type``.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised and attention's dropout
            draws.
        fuse_wgrad_accumulation: put weight gradients into ``main_grad``; needs ``fuse_qkv_params``.
        apply_residual_connection_post_layernorm: add to what the norm gave instead of what it read.
        output_layernorm: no norm before attention, but one (``layernorm``) at the end; the sum behind attention is then
            with what attention read.
        layer_type: "encoder": self-attention only.
        fuse_qkv_params: one weight for queries, keys and values.
        rotary_pos_interleaved: as in MultiheadAttention.
        zero_centered_gamma: gammas are stored minus one, start at 0, and the one is added in fp32.
        qkv_weight_interleaved: as in MultiheadAttention.
        bias: layers have biases.
        activation, activation_params: as in LayerNormMLP.
        normalization: "LayerNorm" or "RMSNorm".
        device: None: the current backend's.
        attn_input_format: "sbhd" (``[s, b, hidden_size]``) or "bshd" (``[b, s, hidden_size]``).
        name: for messages.
        window_size, bottom_right_diagonal, enc_dec_attn_mask_type, enc_dec_bottom_right_diagonal, enc_dec_window_size,
            tp_group, tp_size, seq_length, micro_batch_size, sequence_parallel, parallel_attention_mlp, drop_path_rate,
            set_parallel_mode, ub_tp_comm_overlap, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad,
            ub_bulk_wgrad, qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type, and layer_type "decoder": of
            later features; anything but the default is refused by name.

    Attributes:
        self_attention: the MultiheadAttention.
        layernorm_mlp: the LayerNormMLP.
        layernorm: the norm at the end, with ``output_layernorm``.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: head counts that do not divide; an unknown activation, normalization, mask type or format; a
            probability outside [0, 1); a flag that is no bool; ``fuse_wgrad_accumulation`` without ``fuse_qkv_params``.
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
        self.self_attention = MultiheadAttention(name=self._name_of("self_attention"), **attention_arguments(given))
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
    def forward(  # noqa: D417 - arguments of later features are named together
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
            hidden_states: ``[s, b, hidden_size]`` or ``[b, s, hidden_size]`` by ``attn_input_format``.
            attention_mask: as DotProductAttention takes it.
            self_attn_mask_type: for this call; None: the layer's.
            is_first_microbatch: as in Linear.
            inference_params: the cache of keys and values, of which ``layer_number`` says the layer. Under FP8 rows are
                padded to the number that products take, inside each part.
            rotary_pos_emb: as in MultiheadAttention.
            window_size, bottom_right_diagonal, encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type,
                enc_dec_window_size, enc_dec_bottom_right_diagonal,
                core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill,
                pad_between_seqs: of later features; anything but the default is refused by name.

        Returns:
            The shape of ``hidden_states``.

        Raises:
            TeHalError: as MultiheadAttention and LayerNormMLP.
        """
        check_forward(self.label, locals())
        attended = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
        )
        between = self._added(attended, hidden_states)
        if inference_params is None:
            given = self.layernorm_mlp(between, is_first_microbatch=is_first_microbatch)
        else:
            given = in_padded_rows(self.layernorm_mlp, between, is_first_microbatch=is_first_microbatch)
        output = self._added(given, between)
        return self.layernorm(output) if self.output_layernorm else output

    def _added(self, given: tuple[torch.Tensor, ...], read: torch.Tensor) -> torch.Tensor:
        """What a part gave, after dropout, added to what it read, or to what its norm gave where that is returned."""
        result, bias, *normed = given
        dropout = self.hidden_dropout if self.training else 0.0
        return add_to_residual(result, bias, normed[0] if normed else read, dropout=dropout)

    def extra_repr(self) -> str:
        """Settings, for ``print(model)``."""
        return f"hidden_dropout={self.hidden_dropout}, self_attn_mask_type={self.self_attn_mask_type!r}"
