"""The tensor classes of formats with a scale per block; QuantizedTensor says what they do."""

from __future__ import annotations

from typing import ClassVar

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.quantization.te_names import BlockNames, MXFP8Names
from te_hal.quantization.te_storages import Float8BlockwiseQTensorStorage, MXFP8TensorStorage
from te_hal.schema.block_scales import MTFP8_MODES
from te_hal.schema.formats import ScalingMode


class Float8BlockwiseQTensor(BlockNames, QuantizedTensor):
    """Blocks of 1x128 or 128x128 (docs/numerics.md, B1 to B4).

    With 128x128 blocks either copy follows from the other; with 1x128 neither does (:meth:`update_usage`).
    """

    modes: ClassVar[frozenset[ScalingMode]] = frozenset({ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128})
    storage_class = Float8BlockwiseQTensorStorage


class MXFP8Tensor(MXFP8Names, QuantizedTensor):
    """Blocks of 32 with E8M0 scales (docs/numerics.md, M1 to M3). Neither copy follows from the other."""

    modes: ClassVar[frozenset[ScalingMode]] = frozenset({ScalingMode.MXFP8})
    storage_class = MXFP8TensorStorage


class MTFP8Tensor(QuantizedTensor):
    """Moore Threads' blocks of 128 (docs/numerics.md, T1 to T3)."""

    modes: ClassVar[frozenset[ScalingMode]] = MTFP8_MODES
