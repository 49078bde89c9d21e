"""How NVFP4 data lies in memory: two codes a byte, and both levels of scales in one buffer (docs/numerics.md, NV1).

The scale_inv of a copy is flat: the E4M3 codes of its blocks, laid out and padded as te_hal.schema.block_scales has
them, and behind them the four bytes of the fp32 amax of what was cast. A multiple of 128 comes before those.
"""

from __future__ import annotations

import torch

from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode

#: Modes of E2M1 codes, and of no others.
NVFP4_MODES = frozenset({ScalingMode.NVFP4, ScalingMode.NVFP4_16X16, ScalingMode.NVFP4_HADAMARD})

#: Neighbours that share a scale, and what both sizes of a tensor must be multiples of.
BLOCK = 16

#: The amax under which a block's scale is the whole factor: 448 * 6.
AMAX_OF_ONE = 2688.0

#: Bytes of the amax behind the scales of the blocks.
AMAX_BYTES = 4


def packed_shape(shape: tuple[int, ...], *, rowwise: bool) -> tuple[int, ...]:
    """Shape of the packed codes of a copy: ``[..., K / 2]``, columnwise ``[K, M / 2]``."""
    if rowwise:
        return (*shape[:-1], shape[-1] // 2)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return (shape[-1], rows // 2)


def check_sizes(shape: tuple[int, ...]) -> None:
    """Refuse shapes that do not divide into blocks.

    Raises:
        ArgumentError: names the size that is no multiple of 16.
    """
    rows = 1
    for size in shape[:-1]:
        rows *= size
    sizes = (("the product of the leading sizes", rows), ("the last size", shape[-1] if shape else 1))
    for name, size in sizes:
        if size % BLOCK:
            wanted = -(-size // BLOCK) * BLOCK
            raise ArgumentError(
                "NVFP4",
                got=f"shape {tuple(shape)}: {name} is {size}",
                accepted=f"multiples of {BLOCK}, as each {BLOCK} neighbours share a scale in either direction",
                todo=f"pad it to {wanted}",
            )


def tensor_amax(scale_inv: torch.Tensor) -> torch.Tensor:
    """The amax in a scale_inv buffer: fp32, shape ``[1]``; a view, or a copy where the buffer has gaps or is off."""
    held = scale_inv[-AMAX_BYTES:].contiguous()
    if held.storage_offset() % AMAX_BYTES:
        held = held.clone()
    return held.view(torch.float32)


def set_tensor_amax(scale_inv: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the amax ``[1]``, fp32, into a scale_inv buffer."""
    scale_inv[-AMAX_BYTES:] = amax.contiguous().view(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes ``[..., n]``, one a byte, as ``[..., n / 2]``: the element with the even index in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


#: Values of the sixteen codes.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(packed: torch.Tensor) -> torch.Tensor:
    """fp32 values of packed codes ``[..., n / 2]``, shape ``[..., n]``; the slow and short way."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=packed.device)
    return table[unpack(packed).to(torch.int64)]
