"""Quantizers that find a scale per block from the tensor at hand; they keep no state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.quantization.quantizer_arguments import check_amax_epsilon, check_values, wrong
from te_hal.quantization.square_mxfp8 import quantize_squares
from te_hal.schema.block_scales import scale_shape
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from te_hal.schema.formats import DType, ElementFormat
    from te_hal.schema.storage import QuantizedStorage

_DIMS = {1: ScalingMode.BLOCK_1X128, 2: ScalingMode.BLOCK_128X128}
_TILE = 128


class BlockQuantizer(Quantizer):
    """What quantizers with a scale per block share.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, a ``te.DType`` or an element format.
        mode: which elements share a scale.
        rowwise, columnwise: which copies to make.
        settings: what else the op ``quantize`` takes.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype | DType | ElementFormat,
        mode: ScalingMode,
        *,
        rowwise: bool,
        columnwise: bool,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.mode = mode
        self._settings = settings or {}

    def settings(self) -> dict[str, Any]:
        """What else the op takes, asked before each cast."""
        return self._settings

    def quantize_storage(
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        out: QuantizedStorage | None = None,
        kernels: CastKernels = OPS,
    ) -> QuantizedStorage:
        """Quantize without autograd. See :meth:`Quantizer.quantize_storage`."""
        storage = kernels.quantize(
            tensor,
            out=out,
            dtype=self.format.dtype,
            mode=self.mode,
            rowwise=rowwise,
            columnwise=columnwise,
            columnwise_order=self._order_of(out),
            **self.settings(),
        )
        self.tell_observer(storage, tensor)
        return storage

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """The mode, and what shapes the scales. See :meth:`Quantizer.fused_arguments`."""
        return {
            "dtype": self.format.dtype,
            "mode": self.mode,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "columnwise_order": self.columnwise_order,
            **self.settings(),
        }

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the rowwise or the columnwise scales of a tensor of this shape."""
        return scale_shape(self.mode, tuple(shape), rowwise=not columnwise)

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Shape of the columnwise codes of a tensor of this shape."""
        *leading, last = tuple(shape) or (1,)
        return (last, *leading) if self.columnwise_order is ColumnwiseOrder.TRANSPOSED else (*leading, last)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Nothing to record: scales always come from the tensor at hand."""


class Float8BlockQuantizer(BlockQuantizer):
    """Blocks of 128 (docs/numerics.md, B1 to B3). Any shape is taken; blocks at the edges are shorter.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        rowwise, columnwise: which copies to make.
        amax_epsilon: floor of each block's amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for blocks of 1x128 (columnwise 128x1), 2 for 128x128.

    Raises:
        ArgumentError: names the argument.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype | DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        name = "Float8BlockQuantizer"
        if isinstance(block_scaling_dim, bool) or block_scaling_dim not in _DIMS:
            raise wrong(f"{name}: block_scaling_dim", block_scaling_dim, "1 (1x128 blocks), 2 (128x128 blocks)")
        check_flags(name, {"force_pow_2_scales": force_pow_2_scales})
        settings = {"amax_epsilon": check_amax_epsilon(name, amax_epsilon), "power_of_2": force_pow_2_scales}
        mode = _DIMS[block_scaling_dim]
        super().__init__(fp8_dtype, mode, rowwise=rowwise, columnwise=columnwise, settings=settings)

    @property
    def amax_epsilon(self) -> float:
        """Floor of each block's amax."""
        epsilon: float = self._settings["amax_epsilon"]
        return epsilon

    @property
    def force_pow_2_scales(self) -> bool:
        """Whether scales are powers of two."""
        power_of_2: bool = self._settings["power_of_2"]
        return power_of_2

    @property
    def block_scaling_dim(self) -> int:
        """1 for blocks of 1x128, 2 for 128x128."""
        return next(dim for dim, mode in _DIMS.items() if mode is self.mode)


class MXFP8Quantizer(BlockQuantizer):
    """Blocks of 32 with E8M0 scales (docs/numerics.md, M1, M2).

    Columnwise copies lie in rowwise order, as in Transformer Engine, unless a module's backend reads another one.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        rowwise, columnwise: which copies to make.
        with_2d_quantization: one scale per 32x32 elements, so that both copies hold the same codes (M4); for weights.

    Raises:
        ArgumentError: ``with_2d_quantization`` is no bool.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype | DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        check_flags("MXFP8Quantizer", {"with_2d_quantization": with_2d_quantization})
        super().__init__(fp8_dtype, ScalingMode.MXFP8, rowwise=rowwise, columnwise=columnwise)
        self.with_2d_quantization = with_2d_quantization
        self.columnwise_order = ColumnwiseOrder.SAME

    def quantize_storage(
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        out: QuantizedStorage | None = None,
        kernels: CastKernels = OPS,
    ) -> QuantizedStorage:
        """Quantize without autograd; with 32x32 blocks by ops. See :meth:`Quantizer.quantize_storage`."""
        if not self.with_2d_quantization:
            return super().quantize_storage(tensor, rowwise=rowwise, columnwise=columnwise, out=out, kernels=kernels)
        check_values("MXFP8Quantizer", tensor.dtype)
        storage = quantize_squares(
            tensor, self.format, rowwise=rowwise, columnwise=columnwise, order=self._order_of(out), out=out
        )
        self.tell_observer(storage, tensor)
        return storage

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """The mode. See :meth:`Quantizer.fused_arguments`.

        Raises:
            UnsupportedError: with 32x32 blocks, which no op casts to.
        """
        if self.with_2d_quantization:
            raise UnsupportedError(
                "MXFP8Quantizer: with_2d_quantization",
                got="True for a result that is cast where it is computed",
                accepted="weights, which are cast by themselves",
                todo="use MXFP8Quantizer(dtype) for inputs and gradients",
            )
        return super().fused_arguments(rowwise=rowwise, columnwise=columnwise)


class MTFP8Quantizer(BlockQuantizer):
    """Moore Threads' blocks (docs/numerics.md, T1, T2); columnwise copies always lie in rowwise order.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        block_m, block_n: rows and columns that share a scale: (1, 128) or (128, 128).
        rowwise, columnwise: which copies to make.

    Raises:
        ArgumentError: another block.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype | DType,
        block_m: int = 1,
        block_n: int = _TILE,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        if block_n != _TILE or block_m not in (1, _TILE):
            raise wrong("MTFP8Quantizer: block_m, block_n", (block_m, block_n), "(1, 128), (128, 128)")
        mode = ScalingMode.MTFP8_1X128 if block_m == 1 else ScalingMode.MTFP8_128X128
        super().__init__(fp8_dtype, mode, rowwise=rowwise, columnwise=columnwise)
        self.columnwise_order = ColumnwiseOrder.SAME
