"""LinearCall: one product in a module's forward as its autograd Function sees it, everything but the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from te_hal.modules.delayed_wgrad import DelayedWgrads
    from te_hal.modules.main_grad import FirstMicrobatch
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization.autocast import Region
    from te_hal.quantization.custom_state import CustomScalingState
    from te_hal.quantization.quantizer import Quantizer
    from te_hal.quantization.scaling_state import ScalingState


class Quantizers(NamedTuple):
    """The quantizers of one product, and the state that rolls after its backward."""

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    backward_state: ScalingState | CustomScalingState

    @classmethod
    def of(
        cls,
        quantizers: Mapping[str, Sequence[Quantizer]],
        backward_state: ScalingState | CustomScalingState,
        gemm: int = 0,
    ) -> Quantizers:
        """From a module's quantizers by direction, in slot order; those of its product number ``gemm``."""
        inp, weight, output = quantizers["scaling_fwd"][3 * gemm : 3 * gemm + 3]
        grad_output, grad_input = quantizers["scaling_bwd"][2 * gemm : 2 * gemm + 2]
        return cls(inp, weight, output, grad_output, grad_input, backward_state)


class LinearCall(NamedTuple):
    """What forward and backward of one call share. The graph holds it, so it holds no quantized data.

    Attributes:
        module: label, for messages.
        plan: what runs.
        quantizers: None without FP8.
        parameter: the weight as the user holds it (main_grad belongs to it).
        first_microbatch: shared by the uses of the weight since a first microbatch; None otherwise.
        region: the autocast region; None without FP8.
        updates_backward: this call's backward ends with the update of backward scaling states.
        delayed: where the backward leaves the weight gradient for later; None: it computes it.
    """

    module: str
    plan: LinearPlan
    quantizers: Quantizers | None
    parameter: torch.Tensor
    first_microbatch: FirstMicrobatch | None
    region: Region | None
    updates_backward: bool
    delayed: DelayedWgrads | None = None
