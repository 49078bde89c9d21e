"""NVFP4Tensor: a quantized tensor of 4-bit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.schema.block_scales import te_scale_inv
from te_hal.schema.nvfp4_layout import NVFP4_MODES, tensor_amax

if TYPE_CHECKING:
    import torch

    from te_hal.schema.formats import DType, ScalingMode


class NVFP4Tensor(QuantizedTensor):
    """Blocks of 16 under a scale of the tensor (docs/numerics.md, NV1 to NV8), by Transformer Engine's attributes.

    Scales and amax are views of one buffer per copy. With 16x16 squares either copy follows from the other, else
    neither does (:meth:`update_usage`).
    """

    modes: ClassVar[frozenset[ScalingMode]] = NVFP4_MODES

    _row_scaled_nvfp4 = False
    _nvfp4_use_4over6 = False
    _nvfp4_e4m3_max = 448

    @property
    def _fp4_dtype(self) -> DType:
        return self.quantized_storage.format.code

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return te_scale_inv(self.quantized_storage, rowwise=True)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return te_scale_inv(self.quantized_storage, rowwise=False)

    @property
    def _amax_rowwise(self) -> torch.Tensor | None:
        scale_inv = self.quantized_storage.rowwise_scale_inv
        return None if scale_inv is None else tensor_amax(scale_inv)

    @property
    def _amax_columnwise(self) -> torch.Tensor | None:
        scale_inv = self.quantized_storage.columnwise_scale_inv
        return None if scale_inv is None else tensor_amax(scale_inv)
