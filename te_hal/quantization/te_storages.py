"""Transformer Engine's storage classes: what a quantizer with ``internal`` gives, and what may be built by hand.

A te_hal storage under Transformer Engine's attribute names; ops, modules and ``te.prepare_for_saving`` take it like any
QuantizedStorage. ``isinstance(q, te.Float8TensorStorage)`` also holds of a te.Float8Tensor, as it does there; and of
every quantized tensor for te.QuantizedTensorStorage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.quantization.copies import with_usages
from te_hal.quantization.te_names import BlockNames, Float8Names, MXFP8Names, NVFP4Names
from te_hal.quantization.te_storage_methods import StorageMethods, TensorsToo
from te_hal.schema.block_scales import te_scale_inv
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import E2M1, ColumnwiseOrder, DType, ElementFormat, ScalingMode, element_format
from te_hal.schema.nvfp4_layout import NVFP4_MODES, set_tensor_amax
from te_hal.schema.refusals import declare, refuse
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from te_hal.quantization.quantizer import Quantizer

_SWIZZLED = {"with_gemm_swizzled_scales": "scales lie in rows, as backends take them"}
_OF_MXFP8, _OF_NVFP4 = (
    declare(name, {"with_gemm_swizzled_scales": False}, _SWIZZLED)
    for name in ("MXFP8TensorStorage", "NVFP4TensorStorage")
)


class QuantizedTensorStorage(StorageMethods, QuantizedStorage, metaclass=TensorsToo):
    """Base of the classes, and what formats without a class of Transformer Engine's have; quantizers make it."""

    __slots__ = ("_quantizer",)

    modes: ClassVar[frozenset[Any]] = frozenset()

    _quantizer: Quantizer | None

    def _hold(
        self,
        format: ElementFormat,
        mode: ScalingMode,
        buffers: tuple[torch.Tensor | None, ...],
        *,
        dtype: torch.dtype,
        quantizer: Quantizer | None,
        order: ColumnwiseOrder = ColumnwiseOrder.TRANSPOSED,
    ) -> None:
        """Check and take buffers over, in the order of ``tensors()``; the shape follows from the codes."""
        row, _, column, _ = buffers
        shape = () if row is None else tuple(row.shape)
        if row is None and column is not None:
            shape = (*column.shape[1:], column.shape[0]) if order is ColumnwiseOrder.TRANSPOSED else tuple(column.shape)
        if mode in NVFP4_MODES and (row is not None or column is not None):
            shape = (*shape[:-1], shape[-1] * 2) if row is not None else (shape[0] * 2, *shape[1:])
        QuantizedStorage.__init__(
            self,
            format=format,
            mode=mode,
            shape=shape,
            dtype=dtype,
            rowwise_data=row,
            rowwise_scale_inv=buffers[1],
            columnwise_data=column,
            columnwise_scale_inv=buffers[3],
            columnwise_order=order,
        )
        self._quantizer = quantizer

    def view(self, *shape: Any) -> Any:  # noqa: ANN401 - sizes, or one sequence of them
        """The same codes under another logical shape, see QuantizedStorage.view."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return te_storage(QuantizedStorage.view(self, tuple(sizes)), self._quantizer)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop copies in place, as of a quantized tensor.

        Raises:
            ArgumentError: an argument is no bool, or no copy would be left.
            UnsupportedError: a copy is missing that does not follow from the other without rounding again.
        """
        _take(self, with_usages(type(self).__name__, self, self._quantizer, rowwise_usage, columnwise_usage))


def _take(into: QuantizedStorage, storage: QuantizedStorage) -> None:
    for name in QuantizedStorage.__slots__:
        setattr(into, name, getattr(storage, name))


class Float8TensorStorage(Float8Names, QuantizedTensorStorage):
    """One scale.

    Args:
        data: uint8 codes ``[..., K]``, or None.
        fp8_scale_inv: fp32 ``[1]``.
        fp8_dtype: ``te.DType``, or a torch dtype.
        data_transpose: uint8 codes ``[K, ...]``, or None; at least one of the two.
        quantizer: for :meth:`quantize_`.
        fake_dtype: nominal dtype.

    Raises:
        ArgumentError: no codes, or buffers that do not fit.
    """

    __slots__ = ()
    modes = frozenset({ScalingMode.TENSOR})

    def __init__(
        self,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: DType | torch.dtype,
        data_transpose: torch.Tensor | None = None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype = torch.float32,
    ) -> None:
        codes = element_format(fp8_dtype, "Float8TensorStorage: fp8_dtype")
        scales = (None if data is None else fp8_scale_inv, None if data_transpose is None else fp8_scale_inv)
        buffers = (data, scales[0], data_transpose, scales[1])
        self._hold(codes, ScalingMode.TENSOR, buffers, dtype=fake_dtype, quantizer=quantizer)


class Float8BlockwiseQTensorStorage(BlockNames, QuantizedTensorStorage):
    """Blocks of 128; arguments are those of its ``get_metadata()``, and ``fake_dtype``, the nominal dtype."""

    __slots__ = ()
    modes = frozenset({ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128})

    def __init__(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | torch.dtype,
        quantizer: Quantizer | None,
        is_2D_scaled: bool,  # noqa: N803 - Transformer Engine's spelling
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> None:
        codes = element_format(fp8_dtype, "Float8BlockwiseQTensorStorage: fp8_dtype")
        mode = ScalingMode.BLOCK_128X128 if is_2D_scaled else ScalingMode.BLOCK_1X128
        buffers = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(codes, mode, buffers, dtype=fake_dtype, quantizer=quantizer)


class MXFP8TensorStorage(MXFP8Names, QuantizedTensorStorage):
    """Blocks of 32; arguments are those of its ``get_metadata()``, and ``fake_dtype``, the nominal dtype."""

    __slots__ = ()
    modes = frozenset({ScalingMode.MXFP8})

    def __init__(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: DType | torch.dtype,
        quantizer: Quantizer | None,
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> None:
        refuse("MXFP8TensorStorage", locals(), _OF_MXFP8)
        codes = element_format(fp8_dtype, "MXFP8TensorStorage: fp8_dtype")
        order = ColumnwiseOrder.SAME if quantizer is None else quantizer.columnwise_order
        buffers = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(codes, ScalingMode.MXFP8, buffers, dtype=fake_dtype, quantizer=quantizer, order=order)


class NVFP4TensorStorage(NVFP4Names, QuantizedTensorStorage):
    """4-bit codes; arguments are those of its ``get_metadata()``, and ``fake_dtype``, the nominal dtype.

    Scales of blocks and amaxes are copied into one buffer per copy. Which blocks they are the quantizer says; without
    one they are of 16 elements.
    """

    __slots__ = ()
    modes = NVFP4_MODES

    def __init__(
        self,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        amax_rowwise: torch.Tensor | None,
        amax_columnwise: torch.Tensor | None,
        fp4_dtype: DType = DType.kFloat4E2M1,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype = torch.float32,
    ) -> None:
        refuse("NVFP4TensorStorage", locals(), _OF_NVFP4)
        if fp4_dtype not in (DType.kFloat4E2M1, E2M1):
            raise ArgumentError(
                "NVFP4TensorStorage: fp4_dtype", got=repr(fp4_dtype), accepted="te.DType.kFloat4E2M1", todo="correct it"
            )
        mode = ScalingMode.NVFP4 if quantizer is None else quantizer.mode
        given = (
            (rowwise_data, rowwise_scale_inv, amax_rowwise),
            (columnwise_data, columnwise_scale_inv, amax_columnwise),
        )
        row, column = (_nvfp4_scales(mode, given[place], rowwise=place == 0) for place in (0, 1))
        buffers = (rowwise_data, row, columnwise_data, column)
        self._hold(E2M1, mode, buffers, dtype=fake_dtype, quantizer=quantizer)


def _nvfp4_scales(mode: ScalingMode, given: tuple[torch.Tensor | None, ...], *, rowwise: bool) -> torch.Tensor | None:
    """Both levels of scales of one copy in one buffer."""
    codes, scales, amax = given
    if codes is None or scales is None or amax is None:
        if codes is scales is amax:
            return None
        name = "rowwise" if rowwise else "columnwise"
        raise ArgumentError(
            "NVFP4TensorStorage",
            got=f"a {name} copy without one of {name}_data, {name}_scale_inv and amax_{name}",
            accepted="all three, or none of them",
            todo="pass what get_metadata() of another one gives",
        )
    shape = (*codes.shape[:-1], codes.shape[-1] * 2) if rowwise else (codes.shape[-1] * 2, codes.shape[0])
    kind = StorageKind.of(E2M1, mode, rowwise=rowwise, columnwise=not rowwise, order=ColumnwiseOrder.TRANSPOSED)
    made = QuantizedStorage.empty(kind, tuple(shape), torch.float32, codes.device)
    blocks, buffer = te_scale_inv(made, rowwise=rowwise), made.tensors()[1 if rowwise else 3]
    if blocks is None or buffer is None or blocks.shape != scales.shape or amax.numel() != 1:
        raise ArgumentError(
            "NVFP4TensorStorage: scale_inv",
            got=f"shape {tuple(scales.shape)}, amax of shape {tuple(amax.shape)}",
            accepted=f"shape {None if blocks is None else tuple(blocks.shape)}, padding included; an amax of one",
            todo="pad the scales as Transformer Engine does",
        )
    blocks.copy_(scales.view(torch.uint8))
    set_tensor_amax(buffer, amax.reshape(1).to(torch.float32))
    return buffer


_CLASSES = (Float8TensorStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage)


def te_storage(storage: QuantizedStorage, quantizer: Quantizer | None) -> QuantizedTensorStorage:
    """The same buffers under Transformer Engine's names, in the class of its scaling mode."""
    kind = next((known for known in _CLASSES if storage.mode in known.modes), QuantizedTensorStorage)
    made = kind.__new__(kind)
    _take(made, storage)
    made._quantizer = quantizer  # noqa: SLF001 - of this file
    return made
