"""`--experts`: a transformer layer whose MLP is a mixture of experts, of te_hal's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import te_hal.modules as te
from te_hal.modules.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig

#: Of the loss that balances the experts.
_BALANCE = 1e-2


class ExpertsLayer(nn.Module):
    """`h = x + attention(norm(x))`, `y = h + experts(norm(h))`, each token by its `top_k` experts, none dropped.

    Attention and experts run in FP8 under autocast. The router is torch's: a rounding of its logits sends tokens
    elsewhere.

    Args:
        config: sizes.
        ffn: features inside an expert.
        number: of the layer, from 1.
        device: where parameters are made, in fp32.
    """

    def __init__(self, config: CompareConfig, ffn: int, number: int, device: torch.device) -> None:
        super().__init__()
        width = config.width
        made: dict[str, Any] = {"params_dtype": torch.float32, "device": device}
        self.attention = te.MultiheadAttention(
            width,
            config.heads,
            attention_dropout=0.0,
            layer_number=number,
            attn_mask_type="causal",
            input_layernorm=True,
            fuse_qkv_params=True,
            **made,
        )
        self.norm = te.LayerNorm(width, **made)
        self.router = nn.Linear(width, config.experts, bias=False, device=device)
        self.fc1 = te.GroupedLinear(config.experts, width, ffn, **made)
        self.fc2 = te.GroupedLinear(config.experts, ffn, width, **made)
        self._top_k, self._multiple = config.top_k, config.rows

    def forward(self, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:  # noqa: ANN401 - of the attention
        """`[sequence, batch, width]` to the same; in training the balancing loss joins the backward."""
        hidden = hidden + self.attention(hidden, **attention)
        rows = self.norm(hidden).flatten(0, 1)
        logits = self.router(rows).float()
        probs, chosen = fused_topk_with_score_function(logits, self._top_k, False, None, None, None, "softmax", None)
        counts = chosen.sum(dim=0)
        by_expert, _, row_id_map, pad_offsets, m_splits = te.moe_permute_and_pad_with_probs(
            rows, probs, chosen, counts, self._multiple
        )
        inner = nn.functional.gelu(self.fc1(by_expert, m_splits), approximate="tanh")
        merged = te.moe_unpermute(self.fc2(inner, m_splits), row_id_map, probs, pad_offsets=pad_offsets)
        if self.training:
            merged = _with_loss(merged, self._balance(logits, counts))
        return hidden + merged.view(hidden.shape)

    def _balance(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        _, scores = fused_compute_score_for_moe_aux_loss(logits, self._top_k, "softmax")
        return fused_moe_aux_loss(scores, counts, len(logits), logits.shape[1], self._top_k, _BALANCE)


def parameter_count(config: CompareConfig, ffn: int) -> int:
    """Parameters of a layer."""
    width = config.width
    attention = 2 * width + (width + 1) * 4 * width
    return attention + 2 * width + config.experts * (width + (width + 1) * ffn + (ffn + 1) * width)


def activations_per_token(config: CompareConfig, ffn: int) -> int:
    """Values that a layer keeps for backward per byte.

    The input, and its norm's output; query, key and value, and their rows in the order that attention wants;
    attention's output; the second norm's input and output; of each expert the input, both sides of gelu, the output;
    the router's logits, scores and weights.
    """
    of_experts = config.top_k * (2 * config.width + 2 * ffn)
    return (2 + 3 + 3 + 1 + 2) * config.width + config.heads + of_experts + 4 * config.experts


class _WithLoss(torch.autograd.Function):
    """A tensor whose backward is the loss's, too."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """The values as they are."""
        ctx.like = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """The gradient as it is, and 1 for the loss."""
        dtype, device = ctx.like
        return gradient, torch.ones((), dtype=dtype, device=device)


def _with_loss(values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _WithLoss.apply(values, loss)  # type: ignore[no-untyped-call]
    return result
