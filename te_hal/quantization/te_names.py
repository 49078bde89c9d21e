"""Transformer Engine's names for what quantized tensors and their storages hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.schema.block_scales import SQUARE_MODES, te_scale_inv
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_hal.schema.nvfp4_layout import tensor_amax

if TYPE_CHECKING:
    import torch

    from te_hal.schema.formats import DType


class TeNames:
    """Mixed into classes with a ``quantized_storage``; formats with more or other names add them."""

    __slots__ = ()

    @property
    def _storage(self) -> Any:  # noqa: ANN401 - a storage of any class
        return self.quantized_storage  # type: ignore[attr-defined] # of those that this is mixed into

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self._storage.rowwise_data  # type: ignore[no-any-return] # a buffer

    @_rowwise_data.setter
    def _rowwise_data(self, value: torch.Tensor | None) -> None:
        self._assign("rowwise", value)

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._storage.columnwise_data  # type: ignore[no-any-return]

    @_columnwise_data.setter
    def _columnwise_data(self, value: torch.Tensor | None) -> None:
        self._assign("columnwise", value)

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return self._storage.rowwise_scale_inv  # type: ignore[no-any-return]

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return self._storage.columnwise_scale_inv  # type: ignore[no-any-return]

    @property
    def _fp8_dtype(self) -> DType:
        return self._storage.format.code  # type: ignore[no-any-return]

    @property
    def _dtype(self) -> torch.dtype:
        return self._storage.dtype  # type: ignore[no-any-return]

    def _assign(self, way: str, value: torch.Tensor | None) -> None:
        """None drops a copy, and the shape stays; other codes, or no copy at all, are refused."""
        if value is getattr(self._storage, f"{way}_data"):
            return
        left = {**self.get_usages(), way: False}
        if value is not None or not any(left.values()):
            raise UnsupportedError(
                f"{type(self).__name__}: {way} codes",
                got="no codes for the last copy" if value is None else "codes without their scales",
                accepted="None, where the other copy is there",
                todo="use prepare_for_saving, replace_raw_data or copy_from_storage, or build another one",
            )
        self.update_usage(rowwise_usage=left["rowwise"], columnwise_usage=left["columnwise"])  # type: ignore[attr-defined] # of those that this is mixed into

    def get_usages(self) -> dict[str, bool]:
        """The copies that are there."""
        kind = self._storage.kind
        return {"rowwise": kind.rowwise, "columnwise": kind.columnwise}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:  # noqa: ANN401
        """Codes: of one copy, or a pair of both; None of one that is not there.

        Raises:
            ArgumentError: neither is asked for.
        """
        if not (rowwise_data or columnwise_data):
            raise ArgumentError(
                f"{type(self).__name__}.get_data_tensors",
                got="rowwise_data=False, columnwise_data=False",
                accepted="at least one of them",
                todo="ask for the copy that is needed",
            )
        row, column = self._codes()
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def _codes(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._rowwise_data, self._columnwise_data

    def get_metadata(self) -> dict[str, Any]:
        """What the class's storage is made of, by the names of its constructor's arguments."""
        return {
            "rowwise_data": self._rowwise_data,
            "rowwise_scale_inv": self._rowwise_scale_inv,
            "columnwise_data": self._columnwise_data,
            "columnwise_scale_inv": self._columnwise_scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": getattr(self, "_quantizer", None),
        }

    def copy_from_storage(self, src: object) -> None:
        """Copy the bytes of another one of the same kind and shape into this one's buffers.

        Raises:
            ArgumentTypeError: not quantized.
            ArgumentError: of another format, other blocks, other copies, or another shape.
        """
        if not hasattr(src, "quantized_storage"):
            raise ArgumentTypeError(
                f"{type(self).__name__}.copy_from_storage",
                got=f"a {type(src).__name__}",
                accepted="a quantized tensor or storage",
                todo="use quantize_(tensor) for a plain one",
            )
        into, origin = self._storage, src.quantized_storage
        if into.kind is not origin.kind or into.shape != origin.shape:
            raise ArgumentError(
                f"{type(self).__name__}.copy_from_storage",
                got=f"{origin.kind!r} of shape {origin.shape}",
                accepted=f"{into.kind!r} of shape {into.shape}",
                todo="dequantize it, and quantize_ the values",
            )
        for target, buffer in zip(into.tensors(), origin.tensors(), strict=True):
            if target is not None and buffer is not None:
                target.copy_(buffer)


class Float8Names(TeNames):
    """Of tensors with one scale."""

    __slots__ = ()

    @property
    def _data(self) -> torch.Tensor | None:
        return self._rowwise_data

    @_data.setter
    def _data(self, value: torch.Tensor | None) -> None:
        self._assign("rowwise", value)

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self._columnwise_data

    @_transpose.setter
    def _transpose(self, value: torch.Tensor | None) -> None:
        self._assign("columnwise", value)

    @property
    def _transpose_invalid(self) -> bool:
        return self._columnwise_data is None

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        return self._storage.copy_to_read()[1]  # type: ignore[no-any-return]

    def get_metadata(self) -> dict[str, Any]:
        """What Float8TensorStorage is made of, by the names of its constructor's arguments."""
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose,
            "quantizer": getattr(self, "_quantizer", None),
        }


class BlockNames(TeNames):
    """Of tensors with blocks of 128."""

    __slots__ = ()

    @property
    def _is_2D_scaled(self) -> bool:  # noqa: N802 - Transformer Engine's spelling
        return self._storage.mode in SQUARE_MODES

    def get_metadata(self) -> dict[str, Any]:
        """What Float8BlockwiseQTensorStorage is made of, by the names of its constructor's arguments."""
        return {**super().get_metadata(), "is_2D_scaled": self._is_2D_scaled}


class MXFP8Names(TeNames):
    """Of tensors with blocks of 32."""

    __slots__ = ()

    _with_gemm_swizzled_scales = False

    def get_metadata(self) -> dict[str, Any]:
        """What MXFP8TensorStorage is made of, by the names of its constructor's arguments."""
        return {**super().get_metadata(), "with_gemm_swizzled_scales": False}


class NVFP4Names(TeNames):
    """Of tensors of 4-bit codes: scales and amax are views of one buffer per copy."""

    __slots__ = ()

    _row_scaled_nvfp4 = False
    _nvfp4_use_4over6 = False
    _nvfp4_e4m3_max = 448
    _with_gemm_swizzled_scales = False

    @property
    def _fp4_dtype(self) -> DType:
        return self._fp8_dtype

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return te_scale_inv(self._storage, rowwise=True)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return te_scale_inv(self._storage, rowwise=False)

    @property
    def _amax_rowwise(self) -> torch.Tensor | None:
        scale_inv = self._storage.rowwise_scale_inv
        return None if scale_inv is None else tensor_amax(scale_inv)

    @property
    def _amax_columnwise(self) -> torch.Tensor | None:
        scale_inv = self._storage.columnwise_scale_inv
        return None if scale_inv is None else tensor_amax(scale_inv)

    def get_metadata(self) -> dict[str, Any]:
        """What NVFP4TensorStorage is made of, by the names of its constructor's arguments."""
        held = super().get_metadata()
        held["fp4_dtype"] = held.pop("fp8_dtype")
        amaxes = {"amax_rowwise": self._amax_rowwise, "amax_columnwise": self._amax_columnwise}
        return {**held, **amaxes, "with_gemm_swizzled_scales": False}
