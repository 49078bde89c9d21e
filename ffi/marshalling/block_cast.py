"""quantize and dequantize with a scale per block through a kernel library, and operands as it takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, contiguous, rows_and_cols
from te_hal.schema.block_scales import block_copy
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from te_hal.ffi.native import Native
    from te_hal.schema.storage import StorageKind

    Spare = tuple[torch.Tensor, torch.Tensor]

#: Data, scale_inv and both strides of a copy that is not wanted.
_LEFT_OUT = (0, 0, 0, 0)


class GivenBlocks(NamedTuple):
    """One copy as entries take it.

    Attributes:
        data: codes, contiguous.
        copy: te_hal_copy.
        grid: factors, of any strides but 0; stays alive until the call.
    """

    data: torch.Tensor
    copy: int
    grid: torch.Tensor

    @property
    def strides(self) -> tuple[int, int]:
        """From a block to the next one down and along, in elements; a single one may say 0, which entries refuse."""
        down, along = self.grid.stride()
        return max(down, 1), max(along, 1)


def given_blocks(storage: QuantizedStorage, *, rowwise: bool) -> GivenBlocks:
    """That copy of a storage with blocks; the other one where it is the only one there is."""
    copy = block_copy(storage, rowwise=rowwise)
    code = codes.COPY_ROWWISE if copy.rowwise else codes.COPIES[storage.columnwise_order]
    return GivenBlocks(contiguous(copy.codes), code, _without_overlap(copy.grid))


def _without_overlap(grid: torch.Tensor) -> torch.Tensor:
    """The grid, copied where several blocks share one factor in memory."""
    shared = any(stride == 0 and size > 1 for size, stride in zip(grid.shape, grid.stride(), strict=True))
    return grid.contiguous() if shared else grid


def quantize_blocks(
    native: Native,
    input: torch.Tensor,
    kind: StorageKind,
    out: QuantizedStorage | None,
    *,
    epsilon: float,
    power_of_2: bool,
) -> QuantizedStorage:
    """te_hal.ops.quantize with a scale per block. Padding of scales is not touched."""
    if kind.mode is ScalingMode.TENSOR:
        raise ArgumentError("quantize: scale", got="None", accepted="an fp32 tensor", todo="compute_scale gives one")
    values = contiguous(input)
    target = out
    if target is None:
        shape, device, empty = tuple(values.shape), values.device, native.empty
        target = QuantizedStorage.empty(kind, shape, values.dtype, device, empty)
    arguments: list[int] = []
    spares: list[Spare] = []
    for rowwise, wanted in ((True, kind.rowwise), (False, kind.columnwise)):
        arguments += _written(target, spares, rowwise=rowwise) if wanted else _LEFT_OUT
    status = native.lib.api_quantize_blocks(
        native.library.api,
        address(values),
        codes.DTYPES[values.dtype],
        *rows_and_cols(target.shape),
        codes.MODES[kind.mode],
        epsilon,
        codes.FLAG_POWER_OF_2 if power_of_2 else 0,
        *arguments,
        codes.ORDERS[kind.order],
        codes.DTYPES[kind.format.dtype],
        native.stream(values.device),
    )
    if status:
        native.check(status, "quantize")
    for written, spare in spares:
        written.copy_(spare)
    return target


def _written(target: QuantizedStorage, spares: list[Spare], *, rowwise: bool) -> tuple[int, ...]:
    """Data, scale_inv and strides of a copy that is made; where it cannot be written at once, of a spare."""
    copy = block_copy(target, rowwise=rowwise)
    dense = copy.codes.is_contiguous()
    data = copy.codes if dense else torch.empty_like(copy.codes, memory_format=torch.contiguous_format)
    given = GivenBlocks(data, codes.COPY_ROWWISE, _without_overlap(copy.grid))
    spares += [pair for pair in ((copy.codes, data), (copy.grid, given.grid)) if pair[0] is not pair[1]]
    return address(data), address(given.grid), *given.strides


def dequantize_blocks(
    native: Native, storage: QuantizedStorage, dtype: torch.dtype, *, rowwise: bool = True
) -> torch.Tensor:
    """The values of that copy of a storage with blocks, or of the only one, in ``dtype``."""
    given = given_blocks(storage, rowwise=rowwise)
    output = native.empty(storage.shape, dtype, storage.device)
    status = native.lib.api_dequantize(
        native.library.api,
        address(given.data),
        codes.DTYPES[storage.format.dtype],
        *rows_and_cols(storage.shape),
        given.copy,
        codes.MODES[storage.mode],
        address(given.grid),
        *given.strides,
        address(output),
        codes.DTYPES[dtype],
        native.stream(storage.device),
    )
    if status:
        native.check(status, "dequantize")
    return output
