"""Float8Tensor: a quantized tensor with one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from te_hal.quantization.quantized_tensor import QuantizedTensor
from te_hal.schema.formats import ScalingMode

if TYPE_CHECKING:
    import torch


class Float8Tensor(QuantizedTensor):
    """A :class:`QuantizedTensor` with one scale, under Transformer Engine's attribute names.

    Either copy follows from the other, see :meth:`update_usage`.
    """

    modes: ClassVar[frozenset[ScalingMode]] = frozenset({ScalingMode.TENSOR})

    @property
    def _data(self) -> torch.Tensor | None:
        return self.quantized_storage.rowwise_data

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self.quantized_storage.columnwise_data

    @property
    def _transpose_invalid(self) -> bool:
        return self.quantized_storage.columnwise_data is None

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        return self.quantized_storage.copy_to_read()[1]
