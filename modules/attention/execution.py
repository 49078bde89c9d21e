"""Runs one call of attention by its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.modules.attention import torch_kernels
from te_hal.modules.attention.bias import NO_BIAS
from te_hal.modules.attention.choice import TORCH
from te_hal.modules.attention.layout import heads_merged
from te_hal.modules.attention.packing import padding_of
from te_hal.modules.attention.softmax_type import VANILLA
from te_hal.modules.attention.visibility import EVERYTHING, SoftmaxMask
from te_hal.modules.attention.written_out import Settings, WrittenOut

if TYPE_CHECKING:
    import torch

    from te_hal.modules.attention.call import AttentionCall
    from te_hal.modules.attention.choice import AttentionPlan


def run(
    call: AttentionCall, plan: AttentionPlan, offset: torch.Tensor | None, *, scale: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend; dropout draws from torch's default generator.

    Args:
        call: what of.
        plan: by which kernels.
        offset: ``[h]``, whose exponential joins the sum under the softmax, or None.
        scale: of the scores.
        dropout: share of probabilities that is dropped.

    Returns:
        Heads merged, ``[sq, b, h * dv]``, ``[b, sq, h * dv]`` or ``[t, h * dv]``; the largest score per head, or None.
    """
    if plan.choice.implementation != TORCH:
        return _written_out(call, plan, offset, scale, dropout)
    causal = call.visibility.window == (-1, 0) and not plan.key.windowed
    kernels = plan.choice.kernels
    if call.sequences is not None:
        tensors = (call.query, call.key, call.value)
        attended = torch_kernels.attend_packed(
            *tensors, call.sequences, causal=causal, scale=scale, dropout=dropout, kernels=kernels
        )
        return attended.flatten(1), None
    hidden = call.visibility.everything_hidden(call.sizes, call.query.device) if plan.key.windowed else None
    output = torch_kernels.attend(
        call.query,
        call.key,
        call.value,
        causal=causal,
        scale=scale,
        dropout=dropout,
        kernels=kernels,
        hidden=hidden,
    )
    return heads_merged(output, call.qkv_format), None


def _written_out(
    call: AttentionCall, plan: AttentionPlan, offset: torch.Tensor | None, scale: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors = (call.query, call.key, call.value)
    if call.sequences is not None:
        queries, keys = call.sequences
        tensors = (queries.padded(call.query), keys.padded(call.key), keys.padded(call.value))
    bias = call.bias.added(call.visibility.offset, *call.sizes[2:]) if plan.key.bias != NO_BIAS else None
    settings = Settings(scale, dropout, _mask(call, plan), plan.key.tells_largest)
    output, largest = WrittenOut.apply(*tensors, bias, offset, plan, settings)  # type: ignore[no-untyped-call]
    if call.sequences is not None:
        return call.sequences[0].packed(output, call.query.shape[0]).flatten(1), largest
    return heads_merged(output, call.qkv_format), largest


def _mask(call: AttentionCall, plan: AttentionPlan) -> SoftmaxMask:
    """As the plan was made for: the window in a tensor, or by softmax_fwd's own arguments."""
    visibility, diagonal = call.visibility, call.visibility.diagonal(*call.sizes[2:])
    if call.sequences is not None:
        visibility = visibility._replace(hidden=padding_of(*call.sequences).hidden())
    apart = plan.key.softmax_type != VANILLA or plan.key.tells_largest
    if diagonal is None or (apart and visibility.window != EVERYTHING):
        return SoftmaxMask(visibility.everything_hidden(call.sizes, call.query.device), "none", EVERYTHING)
    return SoftmaxMask(visibility.hidden, *diagonal)
