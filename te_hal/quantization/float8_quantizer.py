"""Float8Quantizer: one scale per tensor, given beforehand (delayed scaling)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import te_hal.ops
from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.quantization.quantizer_arguments import check_plain
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.schema.formats import DType
    from te_hal.schema.storage import QuantizedStorage


class Float8Quantizer(Quantizer):
    """Quantizes with a given scale and records the amax it sees.

    Args:
        scale: fp32, one element; factor into the format. Kept by reference: later changes are seen.
        amax: fp32, one element; becomes ``max(amax, max|tensor|)`` with every tensor, in place.
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        rowwise, columnwise: which copies to make.

    Raises:
        ArgumentError: scale or amax is not an fp32 tensor of one element.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: torch.dtype | DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        for name, tensor in (("scale", scale), ("amax", amax)):
            is_tensor = isinstance(tensor, torch.Tensor)
            if not is_tensor or tensor.numel() != 1 or tensor.dtype != torch.float32:
                raise ArgumentError(
                    f"Float8Quantizer: {name}",
                    got=f"{tensor.dtype} of shape {tuple(tensor.shape)}" if is_tensor else repr(tensor),
                    accepted="torch.float32 of one element",
                    todo="pass torch.ones(1) or torch.zeros(1)",
                )
        self.scale = scale
        self.amax = amax

    @property
    def delayed(self) -> bool:
        """The scale is given."""
        return True

    def quantize_storage(
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        out: QuantizedStorage | None = None,
        kernels: CastKernels = OPS,
    ) -> QuantizedStorage:
        """Quantize without autograd; records amax in place. See :meth:`Quantizer.quantize_storage`."""
        storage = kernels.quantize(
            tensor,
            self.scale,
            amax=self.amax,
            out=out,
            dtype=self.format.dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            columnwise_order=self._order_of(out),
        )
        self.tell_observer(storage, tensor)
        return storage

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """The scale, and the amax that records. See :meth:`Quantizer.fused_arguments`."""
        return {
            "scale": self.scale,
            "amax": self.amax,
            "dtype": self.format.dtype,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "columnwise_order": self.columnwise_order,
        }

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Raise the recorded amax to max|tensor|, in place."""
        check_plain(f"{type(self).__name__}: tensor", tensor)
        te_hal.ops.amax(tensor.detach(), out=self.amax)
