"""Attention written out: scores, the backend's softmax, and a product with the values. Keeps the probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.once import once
from te_hal.modules.rows import as_result
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import QuantizedTensor

if TYPE_CHECKING:
    from te_hal.modules.attention.choice import AttentionPlan


class Settings(NamedTuple):
    """Numbers of one call: ``dropout`` is the share of probabilities that is dropped."""

    scale: float
    dropout: float


class WrittenOut(torch.autograd.Function):
    """softmax(q k^T scale) v, with masks.

    Scores and their gradients are fp32; probabilities are rounded once to the activation dtype, in which they are
    kept, with one byte per probability more where some are dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        plan: AttentionPlan,
        settings: Settings,
    ) -> torch.Tensor:
        """Attend.

        Args:
            ctx: autograd's context.
            query: ``[b, h, sq, d]``.
            key: ``[b, g, sk, d]``, g a divisor of h: each serves h / g heads that follow one another.
            value: ``[b, g, sk, dv]``.
            mask: bool, broadcasts to ``[b, h, sq, sk]``; True hides a key. A row with nothing to see gives 0.
            plan: the kernels.
            settings: the rest.

        Returns:
            ``[b, h, sq, dv]`` in query's dtype.
        """
        batch, heads, queries, _ = query.shape
        rows, keys, values = _grouped(query, key.shape[1]), _flat(key), _flat(value)
        products = _product(rows.float(), keys.float().transpose(1, 2))
        scores = products.view(batch, heads, queries, key.shape[2])
        probabilities = plan.softmax_fwd(
            scores, mask=mask, scale=settings.scale, causal=plan.key.causal, out_dtype=query.dtype
        )
        kept = _draw(probabilities, settings.dropout)
        weights = _dropped(probabilities, kept, settings.dropout)
        output = _product(weights.view(products.shape), values)
        ctx.save_for_backward(rows, keys, values, probabilities, kept)
        ctx.plan, ctx.settings, ctx.shapes = plan, settings, (query.shape, key.shape, value.shape)
        return as_result(output, (batch, heads, queries, value.shape[3]))

    @staticmethod
    @run_eagerly
    @once(lambda _: "DotProductAttention")
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of ``forward``'s arguments; nothing is changed in place.

        Args:
            ctx: autograd's context.
            grad_output: ``[b, h, sq, dv]``; a quantized one is dequantized.

        Returns:
            Gradients of query, key and value in their shapes and dtype, None where not asked for, and None for the
            rest.
        """
        rows, keys, values, probabilities, kept = ctx.saved_tensors
        query_shape, key_shape, value_shape = ctx.shapes
        settings: Settings = ctx.settings
        plain = grad_output.dequantize() if isinstance(grad_output, QuantizedTensor) else grad_output
        grads = _grouped(plain, key_shape[1])
        shape = (rows.shape[0], rows.shape[1], keys.shape[1])
        grad_query = grad_key = grad_value = None
        if ctx.needs_input_grad[2]:
            weights = _dropped(probabilities, kept, settings.dropout).view(shape)
            grad_value = _product(weights.transpose(1, 2), grads).view(value_shape)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            towards = _product(grads.float(), values.float().transpose(1, 2)).view(probabilities.shape)
            towards = _dropped(towards, kept, settings.dropout)
            scores = ctx.plan.softmax_bwd(towards, probabilities, scale=settings.scale)
            scores = scores.to(rows.dtype).view(shape)
            grad_query = _product(scores, keys).view(query_shape) if ctx.needs_input_grad[0] else None
            grad_key = _product(scores.transpose(1, 2), rows).view(key_shape) if ctx.needs_input_grad[1] else None
        return grad_query, grad_key, grad_value, None, None, None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in their dtype, which torch.autocast would change where it gives no ``out``."""
    result = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    return torch.bmm(a, b, out=result)


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """``[b, h, s, d]`` as ``[b * g, h / g * s, d]``: the heads of a group below one another."""
    batch, heads, length, channels = tensor.shape
    return tensor.reshape(batch * groups, heads // groups * length, channels)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


def _draw(probabilities: torch.Tensor, dropout: float) -> torch.Tensor | None:
    """Which probabilities stay, from torch's default generator of the device."""
    if not dropout:
        return None
    return torch.empty(probabilities.shape, dtype=torch.bool, device=probabilities.device).bernoulli_(1.0 - dropout)


def _dropped(values: torch.Tensor, kept: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """``values`` where they stay, scaled up for those that do not."""
    return values if kept is None else (values * kept).mul_(1.0 / (1.0 - dropout))
