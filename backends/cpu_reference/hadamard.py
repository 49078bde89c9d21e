"""Hadamard's transform of 16 neighbours in a column, with fixed signs, and its inverse (docs/numerics.md, NV6)."""

from __future__ import annotations

import torch

#: By which the 16 values are multiplied before the sums. Transformer Engine's "random" signs are these, always.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_SIZE = len(SIGNS)


def transform(values: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """``H @ (sign * values) / 4`` of each 16 rows, H being Sylvester's matrix; the sums are NV6's four steps.

    Args:
        values: fp32 ``[rows, columns]``, rows a multiple of 16; overwritten.
        spare: fp32, contiguous, of the same shape; overwritten.

    Returns:
        ``values``.
    """
    _blocks(values).mul_(_factors(values))
    return _sums(values, spare)


def transform_back(values: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """The inverse, which is ``sign * (H @ values) / 4``; arguments and result as of :func:`transform`."""
    _sums(values, spare)
    _blocks(values).mul_(_factors(values))
    return values


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """``[rows / 16, 16, columns]``, a view."""
    return values.view(values.shape[0] // _SIZE, _SIZE, values.shape[1])


def _factors(values: torch.Tensor) -> torch.Tensor:
    """Signs and the quarter in one factor: exact, as it is a power of two."""
    return torch.tensor(SIGNS, dtype=torch.float32, device=values.device).mul_(0.25)[:, None]


def _sums(values: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """``H @ values`` of each 16 rows: sums and differences of rows 1, 2, 4 and 8 apart, in this order."""
    source, target = values, spare
    for apart in (1, 2, 4, 8):
        shape = (values.shape[0] // (2 * apart), 2, apart * values.shape[1])
        pairs, made = source.view(shape), target.view(shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=made[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=made[:, 1])
        source, target = target, source
    return source  # an even number of steps: `values`
