"""quantize in NVFP4: scales of blocks under one of the tensor, in plain torch (docs/numerics.md, NV1 to NV6).

Both copies are cast by one function, whose blocks run down columns: the rowwise copy from the tensor turned, and so
that its result is turned back. Down columns every step works on whole rows of neighbours in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.backends.cpu_reference.amax import amax, amax_of_extremes
from te_hal.backends.cpu_reference.blocks import tiles
from te_hal.backends.cpu_reference.encode import encode
from te_hal.backends.cpu_reference.fp4_codes import LARGEST, encode_magnitudes, round_stochastically
from te_hal.backends.cpu_reference.hadamard import transform
from te_hal.backends.cpu_reference.philox import philox
from te_hal.schema.block_scales import block_copy, rows_and_cols
from te_hal.schema.formats import E4M3, FLOAT32_MAX, ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK, set_tensor_amax, tensor_amax

if TYPE_CHECKING:
    from te_hal.backends.cpu_reference.blocks import Place
    from te_hal.schema.storage import QuantizedStorage

#: Tiles of a cast, whose three fp32 buffers and bytes of codes and signs are then less than 2 MiB, and less than the
#: bf16 tensor itself from 1024x1024 on. 2**19 elements are no faster: 4096x4096 on 2 cores, both copies: 106 ms, with
#: 2**18 to 2**15 112, 97, 109 and 171.
_MOST, _SHARE = 1 << 17, 12

#: Elements that share one draw of four random words.
_DRAWN_TOGETHER = 8


class _TensorScale(NamedTuple):
    """What the tensor's amax makes of every block of a copy: fp32 tensors of one element (NV2).

    Attributes:
        per_block: times a block's amax, that block's scale before it is rounded to E4M3.
        inverse: times that scale, what codes are multiplied with to give values.
    """

    per_block: torch.Tensor
    inverse: torch.Tensor


class _Rounding(NamedTuple):
    """How the elements of a copy are rounded: ``seed`` None to the nearest, else by draws (NV5)."""

    seed: int | None
    rowwise: bool
    lines: int


class _Workspace:
    """fp32 buffers that one tile after the other uses."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.float32, device=device) for _ in range(3)]

    def of(self, shape: torch.Size) -> list[torch.Tensor]:
        """Three buffers ``shape``, with whatever the last tile left."""
        return [buffer.resize_(shape) for buffer in self._buffers]


def quantize_nvfp4(input: torch.Tensor, out: QuantizedStorage, seed: int | None) -> None:
    """Fill the copies of ``out`` with the codes, block scales and amax of ``input``, tile by tile."""
    rows, cols = rows_and_cols(out.shape)
    given = input.detach().reshape(rows, cols)
    workspace = _Workspace(input.device)
    if out.kind.rowwise:
        _cast_copy(given, out, workspace, amax(given), _Rounding(seed, rowwise=True, lines=rows))
    if out.kind.columnwise:
        if out.mode is ScalingMode.NVFP4_HADAMARD:
            given, largest = _transformed(given, workspace)
        elif out.kind.rowwise:
            largest = tensor_amax(out.rowwise_scale_inv).clone()  # type: ignore[arg-type] # comes with its codes
        else:
            largest = amax(given)
        _cast_copy(given, out, workspace, largest, _Rounding(seed, rowwise=False, lines=cols))


def _transformed(given: torch.Tensor, workspace: _Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """Hadamard's transform of each 16 rows, rounded to bf16, and its amax (NV6)."""
    made = torch.empty_like(given, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    extremes: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place in tiles(*given.shape, most=_MOST, share=_SHARE):
        piece = given[place]
        values, spare, *_ = workspace.of(piece.shape)
        made[place] = transform(values.copy_(piece), spare)
        extremes.append(torch.aminmax(made[place]))
    return made, amax_of_extremes(extremes, made)


def _tensor_scale(amax: torch.Tensor) -> _TensorScale:
    """NV2: 448 * 6 over the tensor's amax, 1 where that is no use, and its inverse."""
    largest, sixth = (torch.full_like(amax, value) for value in (E4M3.max * LARGEST, 1 / LARGEST))
    scale = (largest / amax).clamp_(max=FLOAT32_MAX)
    scale = torch.where((amax == 0) | (scale == 0), 1.0, scale)
    return _TensorScale(scale * sixth, torch.ones_like(scale) / scale)


def _cast_copy(
    given: torch.Tensor, out: QuantizedStorage, workspace: _Workspace, amax: torch.Tensor, rounding: _Rounding
) -> None:
    copy = block_copy(out, rowwise=rounding.rowwise)
    scale_inv = out.rowwise_scale_inv if rounding.rowwise else out.columnwise_scale_inv
    set_tensor_amax(scale_inv, amax)  # type: ignore[arg-type] # comes with its codes
    scale = _tensor_scale(amax)
    square = out.mode is ScalingMode.NVFP4_16X16
    # Seen so that blocks run down: [elements of a line, lines].
    seen = given.t() if rounding.rowwise else given
    packed = copy.codes.view(seen.shape[1], seen.shape[0] // 2)
    grid = copy.grid.t() if rounding.rowwise else copy.grid
    for place in tiles(*seen.shape, most=_MOST, share=_SHARE):
        values, *spare = workspace.of(seen[place].shape)
        values.copy_(seen[place].contiguous())
        codes, block_scales = _cast_down(values, spare, scale, square=square, rounding=rounding, place=place)
        down, across = place
        packed[across, down.start // 2 : down.stop // 2] = codes.t().contiguous()
        grid[down.start // BLOCK : down.stop // BLOCK, across] = block_scales


def _cast_down(
    values: torch.Tensor,
    spare: list[torch.Tensor],
    scale: _TensorScale,
    *,
    square: bool,
    rounding: _Rounding,
    place: Place,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cast of a tile ``[down, across]`` whose blocks are 16 rows of a column (NV3 to NV5).

    Both ``values`` and the two spare buffers are overwritten.

    Returns:
        Codes ``[down / 2, across]``, two neighbours of a column a byte, and E4M3 codes ``[down / 16, across]``.
    """
    scaled, first = spare
    torch.abs(values, out=scaled)
    blocks = scaled.view(-1, BLOCK, scaled.shape[1])
    largest = blocks.amax(1)
    not_numbers = values.isnan() if bool(largest.isnan().any()) else None
    if not_numbers is not None:
        largest = scaled.masked_fill_(not_numbers, 0.0).view_as(blocks).amax(1)
    if square:
        largest = largest.unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)  # type: ignore[no-untyped-call]
    block_scales = encode(largest.mul_(scale.per_block), E4M3)
    divisor = block_scales.view(E4M3.dtype).to(torch.float32).mul_(scale.inverse)
    blocks.mul_((torch.ones_like(divisor) / divisor).clamp_(max=FLOAT32_MAX)[:, None])
    scaled.clamp_(max=LARGEST)
    negative = torch.signbit(values)
    if not_numbers is not None:
        scaled.masked_fill_(not_numbers, LARGEST)
        negative.masked_fill_(not_numbers, value=False)
    if rounding.seed is not None:
        round_stochastically(scaled, _draws(rounding, place))
    codes = encode_magnitudes(scaled, first, values)
    codes |= negative.view(torch.uint8) << 3
    return codes[::2] | (codes[1::2] << 4), block_scales


def _draws(rounding: _Rounding, place: Place) -> torch.Tensor:
    """Numbers between 0 and 1 of a tile ``[down, across]``, by each element's place in the tensor (NV5)."""
    down, across = place
    group = torch.arange(down.start // _DRAWN_TOGETHER, down.stop // _DRAWN_TOGETHER)
    counter = group[:, None] * rounding.lines + torch.arange(across.start, across.stop)
    words = philox(counter & 0xFFFFFFFF, counter >> 32, (0 if rounding.rowwise else 1, 0), rounding.seed or 0)
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=1)
    draws = halves.view(-1, across.stop - across.start).to(torch.float32)
    return draws.add_(0.5).mul_(2.0**-16)
