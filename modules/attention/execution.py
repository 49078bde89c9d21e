"""Runs one call of attention by its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.modules.attention import torch_kernels
from te_hal.modules.attention.bias import NO_BIAS
from te_hal.modules.attention.choice import TORCH
from te_hal.modules.attention.layout import heads_merged
from te_hal.modules.attention.packing import padding_of
from te_hal.modules.attention.visibility import EVERYTHING, SoftmaxMask
from te_hal.modules.attention.written_out import Settings, WrittenOut

if TYPE_CHECKING:
    import torch

    from te_hal.modules.attention.call import AttentionCall
    from te_hal.modules.attention.choice import AttentionPlan
    from te_hal.modules.attention.visibility import Visibility


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
    key, settings = plan.key, torch_kernels.Settings(scale, dropout, plan.choice.kernels)
    if call.sequences is not None and not key.windowed:
        tensors = (call.query, call.key, call.value)
        causal = call.visibility.window == (-1, 0)
        return torch_kernels.attend_packed(*tensors, call.sequences, settings, causal=causal).flatten(1), None
    tensors = _dense(call)
    if key.windowed or key.masked:
        hidden = _within(call).everything_hidden(call.sizes, call.query.device)
        output = torch_kernels.attend_masked(*tensors, hidden, settings, sees_something=key.sees_something)
    else:
        output = torch_kernels.attend(*tensors, settings, causal=call.visibility.window == (-1, 0))
    return _merged(output, call), None


def _dense(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values ``[b, h, s, d]``; packed sequences are padded."""
    if call.sequences is None:
        return call.query, call.key, call.value
    queries, keys = call.sequences
    return queries.padded(call.query), keys.padded(call.key), keys.padded(call.value)


def _within(call: AttentionCall) -> Visibility:
    """Which keys are seen, in packed sequences not those behind their ends."""
    if call.sequences is None:
        return call.visibility
    return call.visibility._replace(hidden=padding_of(*call.sequences).hidden())


def _merged(output: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """``[b, h, s, d]`` as the module returns it."""
    if call.sequences is None:
        return heads_merged(output, call.qkv_format)
    return call.sequences[0].packed(output, call.query.shape[0]).flatten(1)


def _written_out(
    call: AttentionCall, plan: AttentionPlan, offset: torch.Tensor | None, scale: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = call.bias.added(call.visibility.offset, *call.sizes[2:]) if plan.key.bias != NO_BIAS else None
    settings = Settings(scale, dropout, _mask(call, plan), plan.key.tells_largest)
    output, largest = WrittenOut.apply(*_dense(call), bias, offset, plan, settings)  # type: ignore[no-untyped-call]
    return _merged(output, call), largest


def _mask(call: AttentionCall, plan: AttentionPlan) -> SoftmaxMask:
    """As the plan was made for: the window in a tensor, or by softmax_fwd's own arguments."""
    visibility, diagonal = _within(call), call.visibility.diagonal(*call.sizes[2:])
    if plan.key.window_in_tensor or diagonal is None:
        return SoftmaxMask(visibility.everything_hidden(call.sizes, call.query.device), "none", EVERYTHING)
    return SoftmaxMask(visibility.hidden, *diagonal)
