"""Attention written out: scores, the backend's softmax, and a product with the values. Keeps the probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.attention.bias import POST_SCALE, PRE_SCALE
from te_hal.modules.once import once
from te_hal.modules.rows import as_result
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.quantized_tensor import dequantized

if TYPE_CHECKING:
    from te_hal.modules.attention.choice import AttentionPlan
    from te_hal.modules.attention.visibility import SoftmaxMask


class Settings(NamedTuple):
    """Numbers of one call.

    Attributes:
        scale: of the scores.
        dropout: the share of probabilities that is dropped.
        mask: what softmax_fwd hides. With an offset, or where the largest score is asked for, a tensor alone.
        tells_largest: return the largest scores, too.
    """

    scale: float
    dropout: float
    mask: SoftmaxMask
    tells_largest: bool = False


class WrittenOut(torch.autograd.Function):
    """softmax(q k^T scale + bias) v, with masks.

    Scores, bias and their gradients are fp32; probabilities are rounded once to the activation dtype, in which they are
    kept, with one byte per probability more where some are dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        offset: torch.Tensor | None,
        plan: AttentionPlan,
        settings: Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            ctx: autograd's context.
            query: ``[b, h, sq, d]``.
            key: ``[b, g, sk, d]``, g a divisor of h: each serves h / g heads that follow one another.
            value: ``[b, g, sk, dv]``.
            bias: broadcasts to ``[b, h, sq, sk]``; added before the scale or after it, by the plan's key.
            offset: ``[h]``, whose exponential joins the sum under the softmax.
            plan: the kernels.
            settings: the rest. A row with nothing to see gives 0.

        Returns:
            ``[b, h, sq, dv]`` in query's dtype; ``[h]``, fp32, the largest score that is seen (scaled, with its bias,
            -inf where none is), without a gradient, or None.
        """
        batch, heads, queries, _ = query.shape
        rows, keys, values = _grouped(query, key.shape[1]), _flat(key), _flat(value)
        products = _product(rows.float(), keys.float().transpose(1, 2))
        scores, scale = _scores(products.view(batch, heads, queries, key.shape[2]), bias, offset, plan, settings)
        largest = _largest(scores, settings.mask.hidden, scale, heads) if settings.tells_largest else None
        hidden, causal, window = settings.mask
        if offset is not None:
            scores, hidden = _with_offset(scores, offset, hidden)
        probabilities = plan.softmax_fwd(
            scores, mask=hidden, scale=scale, causal=causal, window=window, out_dtype=query.dtype
        )
        kept = _draw(probabilities, settings.dropout, key.shape[2])
        weights = _dropped(probabilities[..., : key.shape[2]], kept, settings.dropout)
        output = _product(weights.reshape(products.shape), values)
        ctx.save_for_backward(rows, keys, values, probabilities, kept)
        ctx.plan, ctx.settings, ctx.shapes = plan, settings, (query.shape, key.shape, value.shape)
        ctx.scale = scale
        ctx.of_bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.of_offset = None if offset is None else offset.dtype
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return as_result(output, (batch, heads, queries, value.shape[3])), largest

    @staticmethod
    @run_eagerly
    @once(lambda _: "DotProductAttention")
    def backward(ctx: Any, grad_output: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of ``forward``'s arguments; nothing is changed in place.

        Args:
            ctx: autograd's context.
            grad_output: ``[b, h, sq, dv]``; a quantized one is dequantized.
            _: of the largest scores, which have none.

        Returns:
            Gradients of query, key, value, bias and offset in their shapes and dtypes, None where not asked for, and
            None for the rest.
        """
        rows, keys, values, probabilities, kept = ctx.saved_tensors
        query_shape, key_shape, value_shape = ctx.shapes
        settings: Settings = ctx.settings
        grads = _grouped(dequantized(grad_output), key_shape[1])
        shape = (rows.shape[0], rows.shape[1], keys.shape[1])
        grad_query = grad_key = grad_value = grad_bias = grad_offset = None
        if ctx.needs_input_grad[2]:
            weights = _dropped(probabilities[..., : key_shape[2]], kept, settings.dropout).reshape(shape)
            grad_value = _product(weights.transpose(1, 2), grads).view(value_shape)
        if any(ctx.needs_input_grad[place] for place in (0, 1, 3, 4)):
            towards = _product(grads.float(), values.float().transpose(1, 2))
            towards = _dropped(towards.view(*query_shape[:3], key_shape[2]), kept, settings.dropout)
            scores, grad_bias, grad_offset = _through_softmax(ctx, towards, probabilities)
            scores = scores.to(rows.dtype).reshape(shape)
            grad_query = _product(scores, keys).view(query_shape) if ctx.needs_input_grad[0] else None
            grad_key = _product(scores.transpose(1, 2), rows).view(key_shape) if ctx.needs_input_grad[1] else None
        return grad_query, grad_key, grad_value, grad_bias, grad_offset, None, None


def _scores(
    products: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    plan: AttentionPlan,
    settings: Settings,
) -> tuple[torch.Tensor, float]:
    """Scores with their bias, in place of the products, and the scale that the softmax has still to apply."""
    before = plan.key.bias == PRE_SCALE
    if bias is not None and before:
        products += bias
    if offset is None and (bias is None or before):
        return products, settings.scale
    products *= settings.scale
    if bias is not None and not before:
        products += bias
    return products, 1.0


def _largest(scores: torch.Tensor, hidden: torch.Tensor | None, scale: float, heads: int) -> torch.Tensor:
    if not scores.numel():
        return scores.new_full((heads,), float("-inf"))
    seen = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    return seen.amax((0, 2, 3)) * scale


def _with_offset(
    scores: torch.Tensor, offset: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores and mask with a column more, which every query sees and no value belongs to."""
    column = offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    if hidden is not None:
        hidden = hidden.expand(*(1,) * (scores.dim() - hidden.dim()), *hidden.shape[:-1], scores.shape[-1])
        hidden = torch.nn.functional.pad(hidden, (0, 1), value=False)
    return torch.cat((scores, column), -1), hidden


def _through_softmax(
    ctx: Any,  # noqa: ANN401 - autograd's context
    towards: torch.Tensor,
    probabilities: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the products of queries and keys, in fp32, of the bias, and of the offset."""
    plan, settings = ctx.plan, ctx.settings
    keys, grad_bias, grad_offset = towards.shape[-1], None, None
    if ctx.of_offset is not None:
        towards = torch.nn.functional.pad(towards, (0, 1))
    _, causal, window = settings.mask
    scores: torch.Tensor = plan.softmax_bwd(towards, probabilities, scale=ctx.scale, causal=causal, window=window)
    if ctx.of_offset is not None:
        if ctx.needs_input_grad[4]:
            grad_offset = scores[..., keys].sum((0, 2)).to(ctx.of_offset)
        scores = scores[..., :keys]
    rest = settings.scale if ctx.scale != settings.scale else 1.0
    if ctx.needs_input_grad[3] and plan.key.bias == POST_SCALE:
        grad_bias = scores.sum_to_size(ctx.of_bias[0]).to(ctx.of_bias[1])
    if rest != 1.0:
        scores = scores * rest
    if ctx.needs_input_grad[3] and plan.key.bias == PRE_SCALE:
        grad_bias = scores.sum_to_size(ctx.of_bias[0]).to(ctx.of_bias[1])
    return scores, grad_bias, grad_offset


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


def _draw(probabilities: torch.Tensor, dropout: float, keys: int) -> torch.Tensor | None:
    """Which probabilities of the keys stay, from torch's default generator of the device."""
    if not dropout:
        return None
    shape = (*probabilities.shape[:-1], keys)
    return torch.empty(shape, dtype=torch.bool, device=probabilities.device).bernoulli_(1.0 - dropout)


def _dropped(values: torch.Tensor, kept: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """``values`` where they stay, scaled up for those that do not."""
    return values if kept is None else (values * kept).mul_(1.0 / (1.0 - dropout))
