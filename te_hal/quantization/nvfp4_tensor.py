"""NVFP4Tensor: a quantized tensor of 4-bit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.quantization.te_names import NVFP4Names
from te_hal.quantization.te_storages import NVFP4TensorStorage
from te_hal.schema.nvfp4_layout import NVFP4_MODES

if TYPE_CHECKING:
    from te_hal.schema.formats import ScalingMode


class NVFP4Tensor(NVFP4Names, QuantizedTensor):
    """Blocks of 16 under a scale of the tensor (docs/numerics.md, NV1 to NV8), by Transformer Engine's attributes.

    Scales and amax are views of one buffer per copy. With 16x16 squares either copy follows from the other, else
    neither does (:meth:`update_usage`).
    """

    modes: ClassVar[frozenset[ScalingMode]] = NVFP4_MODES
    storage_class = NVFP4TensorStorage
