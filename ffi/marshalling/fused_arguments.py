"""What the fused entries have in common: where the scale comes from, and where codes and scale_inv go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from te_hal.ffi import codes
from te_hal.ffi.marshal import address, check_writable
from te_hal.ffi.marshalling.result_storage import kind_of
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    import torch

    from te_hal.ffi.native import Native


class CastFlags(NamedTuple):
    """The flags of a cast, as every fused op has them, under their own names."""

    dtype: torch.dtype
    mode: ScalingMode = ScalingMode.TENSOR
    rowwise: bool = True
    columnwise: bool = False
    columnwise_order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED
    amax_epsilon: float = 0.0
    power_of_2: bool = False


class FusedCast:
    """The cast at the end of one call.

    Args:
        native: makes the result.
        op: for messages.
        like: a tensor of the result's nominal dtype and device.
        shape: of the result.
        scale: what the op was given; None: the result's own amax gives the scale.
        amax: what records beside a given scale.
        flags: of the op.

    Raises:
        ArgumentError: ``amax`` requires a gradient.

    Attributes:
        storage: the result.
        mode: te_hal_mode.
        flags: te_hal_flag of the cast.
    """

    __slots__ = ("_amax", "_epsilon", "_scale", "flags", "mode", "storage")

    def __init__(
        self,
        native: Native,
        op: str,
        like: torch.Tensor,
        shape: tuple[int, ...],
        scale: torch.Tensor | None,
        amax: torch.Tensor | None,
        flags: CastFlags,
    ) -> None:
        if amax is not None:
            check_writable(native, op, "amax", amax)
        kind = kind_of(flags.dtype, flags.mode, flags.rowwise, flags.columnwise, flags.columnwise_order)
        self.storage = QuantizedStorage.empty(kind, shape, like.dtype, like.device, native.empty)
        self.mode = codes.MODE_TENSOR_CURRENT if scale is None else codes.MODES[ScalingMode.TENSOR]
        self.flags = codes.FLAG_POWER_OF_2 if flags.power_of_2 else 0
        self._scale, self._amax, self._epsilon = scale, amax, flags.amax_epsilon

    def scaling(self) -> tuple[int, int, int, float]:
        """mode, scale, amax and scale_epsilon of the entries."""
        return self.mode, address(self._scale), address(self._amax), self._epsilon

    def results(self) -> tuple[int, int, int, int, int, int]:
        """rowwise_data to output_dtype of the entries."""
        row, row_scale_inv, col, col_scale_inv = self.storage.tensors()
        kind = self.storage.kind
        order, dtype = codes.ORDERS[kind.order], codes.DTYPES[kind.format.dtype]
        return address(row), address(col), order, address(row_scale_inv), address(col_scale_inv), dtype
