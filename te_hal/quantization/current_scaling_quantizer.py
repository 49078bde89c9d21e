"""Float8CurrentScalingQuantizer: one scale per tensor, from that tensor's own amax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.amax_reduction import check_group, check_single_process
from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.quantization.quantizer_arguments import check_amax_epsilon
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from te_hal.schema.formats import DType
    from te_hal.schema.storage import QuantizedStorage


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantizes with the scale that the tensor's own amax gives (docs/numerics.md, S1-S4). Stateless.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2`` or a ``te.DType``.
        device: device of the tensors to come; None: any. A tensor from elsewhere is refused.
        rowwise, columnwise: which copies to make.
        with_amax_reduction, amax_reduction_group: take amax over these processes, None: over all. Several are
            refused for now.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: floor of amax.

    Raises:
        ArgumentError: ``amax_epsilon`` is no number from 0 to fp32's largest; ``force_pow_2_scales`` no bool.
        UnsupportedError: ``with_amax_reduction`` over several processes.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype | DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        name = type(self).__name__
        check_group(f"{name}: amax_reduction_group", amax_reduction_group)
        if with_amax_reduction:
            check_single_process(f"{name}: with_amax_reduction", amax_reduction_group)
        check_flags(name, {"force_pow_2_scales": force_pow_2_scales})
        self.device = None if device is None else torch.device(device)
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = check_amax_epsilon(name, amax_epsilon)

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
        self._check_device(tensor)
        storage = kernels.quantize_current(
            tensor,
            out=out,
            dtype=self.format.dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            columnwise_order=self._order_of(out),
            amax_epsilon=self.amax_epsilon,
            power_of_2=self.force_pow_2_scales,
        )
        self.tell_observer(storage, tensor)
        return storage

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:
        """What shapes the scale. See :meth:`Quantizer.fused_arguments`."""
        return {
            "dtype": self.format.dtype,
            "rowwise": rowwise,
            "columnwise": columnwise,
            "columnwise_order": self.columnwise_order,
            "amax_epsilon": self.amax_epsilon,
            "power_of_2": self.force_pow_2_scales,
        }

    def _check_device(self, tensor: torch.Tensor) -> None:
        wanted = self.device
        if wanted is None or tensor.device == wanted:
            return
        if tensor.device.type != wanted.type or wanted.index is not None:
            raise ArgumentError(
                "Float8CurrentScalingQuantizer",
                got=f"a tensor on {tensor.device}",
                accepted=f"tensors on {wanted}, the quantizer's device",
                todo="move the tensor, or make the quantizer with device=None",
            )

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Nothing to record: the scale always comes from the tensor at hand."""
