"""Rows gathered by an index, and sums of gathered rows: the two autograd Functions that experts' rows travel by.

Each is the other's backward. A sum runs in fp32, slot by slot, and rounds once; in which order never depends on
chance. Indices are int64, so offsets into large tensors do not wrap. Neither waits for a device: whether rows
are missing is looked for on the host alone.
"""

from __future__ import annotations

from typing import Any

import torch

from te_hal.modules.moe.quantized_rows import gathered_storage
from te_hal.modules.once import once
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.quantized_tensor import QuantizedTensor, dequantized, wrap

#: In an index: no row.
NOBODY = -1


def gather(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``rows[source]``, ``[R, ...]``; zeros where ``source`` has no row."""
    if not len(rows):
        return rows.new_zeros(len(source), *rows.shape[1:])
    missing = source < 0
    found = rows.index_select(0, source.clamp_min(0))
    if _may_be_any(missing):
        found.masked_fill_(missing.view(-1, *[1] * (found.dim() - 1)), 0)
    return found


def _may_be_any(flags: torch.Tensor) -> bool:
    """False where none is set; of flags on a device, which would be waited for, True."""
    return flags.device.type != "cpu" or bool(flags.any())


def total(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """For each token the sum of its rows, each times its weight.

    Args:
        rows: ``[R, hidden]``.
        slots: int64 ``[tokens, S]``: rows of each token, NOBODY where there are fewer.
        weights: ``[tokens, S]`` in fp32, or None for ones.

    Returns:
        ``[tokens, hidden]`` in the rows' dtype, summed in fp32 (fp64 for fp64) from the first slot to the last.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = torch.zeros(len(slots), rows.shape[1], dtype=wide, device=rows.device)
    if len(rows) and slots.numel():
        for number in range(slots.shape[1]):
            slot = slots[:, number]
            addend = rows.index_select(0, slot.clamp_min(0)).to(wide)
            if weights is not None:
                addend.mul_(weights[:, number : number + 1])
            missing = slot < 0
            found.add_(addend.masked_fill_(missing[:, None], 0) if _may_be_any(missing) else addend)
    return found.to(rows.dtype)


def inverse(slots: torch.Tensor, values: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """For each of ``count`` rows the value that stands in ``values`` where ``slots`` names it; ``fill`` for others."""
    # What no slot names goes to a place of its own behind the rows: taking it out would wait for a device.
    found = torch.full((count + 1,), fill, dtype=values.dtype, device=values.device)
    found[torch.where(slots < 0, count, slots)] = values
    return found[:count]


class GatherRows(torch.autograd.Function):
    """``rows[source]``; the gradient of a row is the sum of those it was gathered to."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        rows: torch.Tensor,
        source: torch.Tensor,
        slots: torch.Tensor,
        where: str,
    ) -> torch.Tensor:
        """Gather.

        Args:
            ctx: autograd's context.
            rows: ``[tokens, hidden]``; quantized ones keep codes and scales, nothing is rounded again.
            source: int64 ``[R]``, the token of each row; NOBODY for a row of zeros.
            slots: int64 ``[tokens, S]``: where each token went.
            where: names the caller, for messages.
        """
        ctx.save_for_backward(slots)
        ctx.where = where
        if isinstance(rows, QuantizedTensor):
            return wrap(gathered_storage(where, rows.quantized_storage, source))
        return gather(rows, source)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.where)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Sum; a quantized gradient is dequantized."""
        (slots,) = ctx.saved_tensors
        return total(dequantized(gradient), slots, None), None, None, None


class SumRows(torch.autograd.Function):
    """The sum of each token's rows, weighted or not."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        slots: torch.Tensor,
        where: str,
    ) -> torch.Tensor:
        """See :func:`total`; ``where`` names the caller, for messages."""
        kept = rows if weights is not None and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weights, slots)
        ctx.count, ctx.where = len(rows), where
        return total(rows, slots, weights)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.where)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Gradients of rows, in their dtype, and of weights: the scalar product of row and gradient, in fp32.

        A quantized gradient is dequantized.
        """
        rows, weights, slots = ctx.saved_tensors
        gradient = dequantized(gradient)
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            tokens = torch.arange(len(slots), device=slots.device)[:, None].expand_as(slots)
            grad_rows = gather(gradient, inverse(slots, tokens, ctx.count, NOBODY))
            if weights is not None:
                of_row = inverse(slots, weights, ctx.count, 0.0)
                grad_rows = (grad_rows.to(of_row.dtype) * of_row[:, None]).to(gradient.dtype)
        if weights is not None and ctx.needs_input_grad[1]:
            grad_weights = torch.zeros_like(weights)
            for number in range(slots.shape[1] if ctx.count else 0):
                slot = slots[:, number]
                found = rows.index_select(0, slot.clamp_min(0)).to(weights.dtype)
                products = (found * gradient.to(weights.dtype)).sum(dim=1)
                grad_weights[:, number] = products.masked_fill_(slot < 0, 0)
        return grad_rows, grad_weights, None, None
