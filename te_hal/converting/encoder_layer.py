"""nn.TransformerEncoderLayer as TransformerLayer, where both compute the same; it is called as torch's is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from te_hal.converting.attention import difference_of_attention
from te_hal.converting.masks import attention_mask, padding_mask, refuse_hint, summed
from te_hal.converting.replacement import hand_over, reason_against_fp8
from te_hal.modules import TransformerLayer
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from torch import nn

    from te_hal.quantization.operand_formats import Formats

_WHERE = "EncoderLayer"

#: Parameters of TransformerLayer to those of torch's layer. Queries, keys and values lie one after the other in both.
_NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": "norm1.weight",
    "self_attention.layernorm_qkv.layer_norm_bias": "norm1.bias",
    "self_attention.layernorm_qkv.weight": "self_attn.in_proj_weight",
    "self_attention.layernorm_qkv.bias": "self_attn.in_proj_bias",
    "self_attention.proj.weight": "self_attn.out_proj.weight",
    "self_attention.proj.bias": "self_attn.out_proj.bias",
    "layernorm_mlp.layer_norm_weight": "norm2.weight",
    "layernorm_mlp.layer_norm_bias": "norm2.bias",
    "layernorm_mlp.fc1_weight": "linear1.weight",
    "layernorm_mlp.fc1_bias": "linear1.bias",
    "layernorm_mlp.fc2_weight": "linear2.weight",
    "layernorm_mlp.fc2_bias": "linear2.bias",
}


class EncoderLayer(torch.nn.Module):
    """A TransformerLayer with the call of ``nn.TransformerEncoderLayer``. Parameters have the layer's names.

    A state dict with torch's names loads as one with its own names does.

    Args:
        old: the module whose place it takes. Its parameters are used as they are.
    """

    def __init__(self, old: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        batch_first = old.self_attn.batch_first
        self.layer = TransformerLayer(
            old.linear1.in_features,
            old.linear1.out_features,
            old.self_attn.num_heads,
            layernorm_epsilon=old.norm1.eps,
            hidden_dropout=old.dropout1.p,
            attention_dropout=old.self_attn.dropout,
            self_attn_mask_type="no_mask",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            activation="relu",
            params_dtype=old.linear1.weight.dtype,
            attn_input_format="bshd" if batch_first else "sbhd",
            device="meta",
        )
        hand_over(self.layer, old, _NAMES)
        self._heads = old.self_attn.num_heads
        #: What nn.TransformerEncoder asks its first layer for.
        self.self_attn = SimpleNamespace(batch_first=batch_first)
        self.register_load_state_dict_pre_hook(_take_torchs_names)  # type: ignore[no-untyped-call]
        self.train(old.training)

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            src: ``[N, L, E]`` with batch_first, else ``[L, N, E]``.
            src_mask: bool ``[L, L]`` or ``[N * heads, L, L]``, True hides; or fp, added to the scores.
            src_key_padding_mask: ``[N, L]``, of the same kinds.
            is_causal: a hint that ``src_mask`` is the causal one; it is not read, the mask is.

        Returns:
            A tensor of src's shape.

        Raises:
            ArgumentError: a mask of another shape or dtype; ``is_causal`` without a mask.
            UnsupportedError: a sequence without a batch.
        """
        refuse_hint(_WHERE, "src_mask", src_mask, is_causal=is_causal)
        if src.dim() != 3:  # noqa: PLR2004 - a batch
            raise UnsupportedError(
                f"{_WHERE}: src",
                got=f"shape {tuple(src.shape)}",
                accepted="three sizes, with a batch",
                todo="add a batch of one: src[None], or src[:, None] without batch_first",
            )
        batch, length = src.shape[:2] if self.self_attn.batch_first else (src.shape[1], src.shape[0])
        given = []
        if src_key_padding_mask is not None:
            given.append(padding_mask(f"{_WHERE}: src_key_padding_mask", src_key_padding_mask, batch, length))
        if src_mask is not None:
            given.append(attention_mask(f"{_WHERE}: src_mask", src_mask, (batch, self._heads, length, length)))
        result: torch.Tensor = self.layer(src, **_masking(given, src.dtype))
        return result


def encoder_layer(old: nn.TransformerEncoderLayer, formats: Formats) -> EncoderLayer | str:
    """The counterpart, or why there is none; its parts then are converted one by one."""
    reason = _difference(old) or reason_against_fp8(tuple(old.linear1.weight.shape), formats)
    reason = reason or reason_against_fp8(tuple(old.linear2.weight.shape), formats)
    return reason or EncoderLayer(old)


def _difference(old: nn.TransformerEncoderLayer) -> str | None:
    """What a TransformerLayer would compute otherwise."""
    if not old.norm_first:
        return "its norms come after the sums (norm_first=False), which TransformerLayer has not; its parts stand alone"
    if not (old.activation is torch.nn.functional.relu or type(old.activation) is torch.nn.ReLU):
        return "its activation is no relu (torch's gelu is another function than te_hal's); its parts stand alone"
    if old.dropout.p > 0.0 or old.dropout1.p != old.dropout2.p:
        return "it drops out between its products, or in two shares; its parts stand alone"
    names = {name for name, _ in old.named_parameters()}
    if not names.issuperset(_NAMES.values()) or old.norm1.eps != old.norm2.eps:
        return "it lacks a bias, or its norms have two eps; its parts stand alone"
    return difference_of_attention(old.self_attn)


def _masking(given: list[torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Masks as arguments of TransformerLayer: -inf hides, and what else there is becomes a bias."""
    mask = summed(given)
    if mask is None:
        return {"self_attn_mask_type": "no_mask"}
    if mask.dtype == torch.bool:
        return {"attention_mask": mask, "self_attn_mask_type": "arbitrary"}
    hidden = mask == -torch.inf
    arguments: dict[str, Any] = {"attention_mask": hidden, "self_attn_mask_type": "arbitrary"}
    bias = mask.masked_fill(hidden, 0.0)
    # Whether zeros are all there is is looked for on the host alone: a device would be waited for, in every layer.
    if mask.requires_grad or mask.device.type != "cpu" or bool(bias.any()):
        arguments["core_attention_bias_type"] = "post_scale_bias"
        arguments["core_attention_bias"] = bias if bias.dtype in FLOATS else bias.to(dtype)
    return arguments


def _take_torchs_names(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:  # noqa: ARG001
    """Rename what was saved from nn.TransformerEncoderLayer, before it is loaded."""
    for inside, outside in _NAMES.items():
        if prefix + outside in state_dict:
            state_dict[f"{prefix}layer.{inside}"] = state_dict.pop(prefix + outside)


def torch_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict of a converted model as the model had it before, with torch's names and no extra states.

    Args:
        model: converted by :func:`te_hal.convert`; in it whatever else.

    Returns:
        The values of ``model.state_dict()``, detached and sharing memory, for ``load_state_dict`` of the torch model.
    """
    layers = {name for name, part in model.named_modules(remove_duplicate=False) if isinstance(part, EncoderLayer)}
    prefixes = [f"{name}." if name else "" for name in layers]
    renamed = {f"{prefix}layer.{inside}": prefix + outside for prefix in prefixes for inside, outside in _NAMES.items()}
    state = model.state_dict()
    return {renamed.get(key, key): value for key, value in state.items() if not key.endswith("_extra_state")}
