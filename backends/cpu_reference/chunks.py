"""Walks a tensor in pieces whose fp32 copy stays in the cache, so that several passes cost one trip to memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: Elements per piece: 2 MiB of fp32. Quantizing 4096x4096 bf16 on 2 cores with 1 MiB of second-level cache each took
#: 11.9, 9.3, 8.4, 7.9 and 7.3 ms with 2**16 to 2**20: small pieces pay for the start of every pass, and past 2**19
#: the little that is left to win costs more memory. `benchmarks/quantize.py --chunk` repeats the measurement.
CHUNK = 1 << 19

#: A piece is no more than a quarter of the tensor either, but for tensors so small that this costs more than 1 in 20 of
#: the time: 1024x1024 take 0.93 ms by quarters and 0.89 as two halves, 512x512 0.29 and 0.27.
_LEAST, _SHARE = 1 << 18, 4


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as ``[rows, K]``, K being its last size; ``[numel, 1]`` when it has one dimension or none.

    A view wherever strides allow it, which for rank 2 and for contiguous tensors is always.
    """
    if tensor.dim() < 2:  # noqa: PLR2004 - no rows and columns
        return tensor.reshape(-1, 1)
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])


def row_spans(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of ``[rows, K]``, up to CHUNK elements each or one row; none if it is empty."""
    if rows.numel() == 0:
        return
    step = max(1, min(CHUNK, max(_LEAST, rows.numel() // _SHARE)) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield slice(start, start + step)
