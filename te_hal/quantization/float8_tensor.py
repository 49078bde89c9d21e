"""Float8Tensor: a quantized tensor with one scale."""

from __future__ import annotations

from typing import ClassVar

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.quantization.te_names import Float8Names
from te_hal.quantization.te_storages import Float8TensorStorage
from te_hal.schema.formats import ScalingMode


class Float8Tensor(Float8Names, QuantizedTensor):
    """A :class:`QuantizedTensor` with one scale, under Transformer Engine's attribute names.

    Either copy follows from the other, see :meth:`update_usage`.
    """

    modes: ClassVar[frozenset[ScalingMode]] = frozenset({ScalingMode.TENSOR})
    storage_class = Float8TensorStorage
