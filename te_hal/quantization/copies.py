"""Missing copies of quantized data, made from the one that is there without rounding again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.quantization.quantizer_arguments import check_usage
from te_hal.schema.block_scales import SQUARE_MODES, block_copy
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import BLOCK, pack, set_tensor_amax, tensor_amax, unpack
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    import torch

    from te_hal.quantization.quantizer import Quantizer

#: Modes in which both copies hold the same codes.
_SAME_CODES = SQUARE_MODES | {ScalingMode.TENSOR}


def follow(storage: QuantizedStorage, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder) -> bool:
    """Whether :func:`with_copies` has or can make the wanted copies."""
    return storage.mode in _SAME_CODES or _are_there(storage, rowwise=rowwise, columnwise=columnwise, order=order)


def _are_there(storage: QuantizedStorage, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder) -> bool:
    has_column = storage.columnwise_data is not None and storage.columnwise_order == order
    return (not rowwise or storage.rowwise_data is not None) and (not columnwise or has_column)


def with_usages(
    where: str, storage: QuantizedStorage, quantizer: Quantizer | None, rowwise: bool | None, columnwise: bool | None
) -> QuantizedStorage:
    """The copies that ``update_usage`` of ``where`` asks for; None: as they are.

    A columnwise copy that is made lies as the quantizer would make it.

    Raises:
        ArgumentError: an argument is no bool, or no copy would be left.
        UnsupportedError: a copy is missing that does not follow from the other without rounding again.
    """
    wanted = {"rowwise": storage.kind.rowwise, "columnwise": storage.kind.columnwise}
    for name, usage in (("rowwise", rowwise), ("columnwise", columnwise)):
        check_usage(f"{where}.update_usage: {name}_usage", usage)
        wanted[name] = wanted[name] if usage is None else usage
    order = storage.columnwise_order
    if quantizer is not None and not storage.kind.columnwise:
        order = quantizer.columnwise_order
    return with_copies(storage, **wanted, order=order).keep(**wanted)


def with_copies(
    storage: QuantizedStorage, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> QuantizedStorage:
    """A storage that has the wanted copies: kept where present, else rearranged from the other copy.

    With one scale per tensor or per square block both copies hold the same codes, so rearranging is exact.

    Raises:
        UnsupportedError: a scaling mode whose copies have codes and scales of their own.
    """
    if _are_there(storage, rowwise=rowwise, columnwise=columnwise, order=order):
        return storage
    has_column = storage.columnwise_data is not None and storage.columnwise_order == order
    if storage.mode not in _SAME_CODES:
        raise _underivable(storage, rowwise=rowwise, columnwise=columnwise, order=order)
    if storage.mode is ScalingMode.NVFP4_16X16:
        return _both_nvfp4_copies(storage)
    codes, scale_inv, transposed = storage.copy_to_read()
    row = codes.movedim(0, -1).contiguous() if transposed else codes
    makes_column = columnwise and not has_column
    column = storage.columnwise_data if has_column else None
    if makes_column:
        column = row if order == ColumnwiseOrder.SAME else row.movedim(-1, 0).contiguous()
    kind = StorageKind.of(storage.format, storage.mode, rowwise=True, columnwise=column is not None, order=order)
    if storage.mode is ScalingMode.TENSOR:
        buffers = (row, scale_inv, column, None if column is None else scale_inv)
        return QuantizedStorage.of_kind(kind, storage.shape, storage.dtype, storage.device, buffers)
    scales = _block_scales(storage, kind)
    return QuantizedStorage.of_kind(
        kind, storage.shape, storage.dtype, storage.device, (row, scales[0], column, scales[1])
    )


def _both_nvfp4_copies(storage: QuantizedStorage) -> QuantizedStorage:
    """Both copies of NVFP4 data with 16x16 squares, one of which is there: packed codes have to be taken apart."""
    there = storage.kind.rowwise
    kind = StorageKind.of(storage.format, storage.mode, rowwise=True, columnwise=True, order=storage.kind.order)
    made = QuantizedStorage.empty(kind, storage.shape, storage.dtype, storage.device)
    given, missing = block_copy(storage, rowwise=there), block_copy(made, rowwise=not there)
    turned = unpack(given.codes.flatten(0, -2)).t()
    missing.codes.copy_(pack(turned).view(missing.codes.shape))
    if there:
        missing.grid.copy_(given.grid[::BLOCK].repeat_interleave(BLOCK, 1))
    else:
        missing.grid.copy_(given.grid[:, ::BLOCK].repeat_interleave(BLOCK, 0))
    held, new = storage.tensors(), made.tensors()
    buffers = (*held[:2], *new[2:]) if there else (*new[:2], *held[2:])
    from_, to = (buffers[1], buffers[3]) if there else (buffers[3], buffers[1])
    set_tensor_amax(to, tensor_amax(from_))  # type: ignore[arg-type] # both are there
    return QuantizedStorage.of_kind(kind, storage.shape, storage.dtype, storage.device, buffers)


def _block_scales(storage: QuantizedStorage, kind: StorageKind) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """scale_inv of both copies of a storage with square blocks: what is there, and the others in their layout."""
    held = (storage.rowwise_scale_inv, storage.columnwise_scale_inv)
    if held[0] is not None and (held[1] is not None or not kind.columnwise):
        return held
    made = QuantizedStorage.empty(kind, storage.shape, storage.dtype, storage.device)
    factors = block_copy(storage, rowwise=storage.kind.rowwise).grid
    for rowwise in (True, False):
        if kind.rowwise if rowwise else kind.columnwise:
            block_copy(made, rowwise=rowwise).grid.copy_(factors)
    return (
        made.rowwise_scale_inv if held[0] is None else held[0],
        made.columnwise_scale_inv if held[1] is None else held[1],
    )


def _underivable(
    storage: QuantizedStorage, *, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> UnsupportedError:
    has = [name for name, on in (("rowwise", storage.kind.rowwise), ("columnwise", storage.kind.columnwise)) if on]
    wanted = [name for name, on in (("rowwise", rowwise), ("columnwise", columnwise)) if on]
    missing = [name for name in wanted if name not in has] or [f"columnwise in order {order.value!r}"]
    return UnsupportedError(
        "QuantizedStorage",
        got=f"a {' and '.join(missing)} copy wanted from the {' and '.join(has)} one of {storage.kind!r}",
        accepted="copies that are there: in this scaling mode each is cast from the unquantized tensor",
        todo="quantize again from the unquantized tensor, with both usages",
    )
