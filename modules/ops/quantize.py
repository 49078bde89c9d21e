"""Quantize: an op that gives its input, or its gradient, quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.activation_dtype import activation_dtype
from te_hal.modules.linear_steps import quantize_result
from te_hal.modules.once import once
from te_hal.modules.ops.input_checks import check_input
from te_hal.modules.ops.operation import BasicOperation
from te_hal.modules.recompute import recomputable
from te_hal.modules.scaling_module import ScalingModule
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import QuantizedTensor
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.quantizer import OPS
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from te_hal.quantization.autocast import Frame, Region


class _Call(NamedTuple):
    """What forward and backward of a call share.

    Attributes:
        forward, backward: the quantizer of either direction; None where that stays as it is.
        state: what rolls after the backward under delayed scaling; else None.
        region: the autocast region.
        updates: the backward ends with the update of backward scaling states, as the region's last.
    """

    forward: Any
    backward: Any
    state: Any
    region: Region | None
    updates: bool


class Quantize(ScalingModule, BasicOperation):
    """Quantize what goes through as the recipe in force quantizes a product's input, or its gradient.

    The rounding has no gradient. Outside of autocast the op gives the input itself.
    A product reads per-tensor codes as they are; those of other recipes it dequantizes and quantizes again.

    Args:
        forward: quantize the input, rowwise.
        backward: quantize the gradient, rowwise.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        check_flags("Quantize", {"forward": forward, "backward": backward})
        super().__init__(None)
        self._forward, self._backward = forward, backward

    @run_eagerly
    @recomputable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Give the input, quantized under autocast where asked for.

        Args:
            input: any shape; one that is quantized already stays as it is.

        Raises:
            ArgumentTypeError, ArgumentError: no tensor; a dtype that no kernel takes.
            UnsupportedError: the backend lacks the recipe.
        """
        check_input(self.label, input)
        frame = current_frame()
        activation_dtype(self.label, input)
        if not frame.enabled or frame.recipe is None or not (self._forward or self._backward):
            return input
        self._begin(frame, input.device)
        forward = self._forward and not isinstance(input, QuantizedTensor)
        output: torch.Tensor = _QuantizeFunction.apply(input, self._call(frame, input, forward=forward))  # type: ignore[no-untyped-call]
        return output

    def _begin(self, frame: Frame, device: torch.device) -> None:
        """Bring scaling state into line with the recipe; nothing in a recompute."""
        if frame.again or frame.recipe is None:
            return
        self.use_recipe(frame.recipe, device)
        if frame.record is not None:
            frame.record.take_quantizers(self.quantizers, self.fp8_meta["scaling_bwd"])

    def _call(self, frame: Frame, input: torch.Tensor, *, forward: bool) -> _Call:
        record, again = frame.record, frame.again
        quantizers = record.quantizers if again else self.quantizers
        of_input, of_grad = quantizers["scaling_fwd"][0], quantizers["scaling_bwd"][0]
        region, updates = frame.region, False
        state = (record.backward_state if again else self.fp8_meta["scaling_bwd"]).delayed
        if region is not None and not again:
            recorded = self.fp8_meta["scaling_fwd"].delayed
            if forward and recorded is not None:
                region.queue.add(recorded, forward=True)
            wanted = torch.is_grad_enabled() or (record is not None and record.expects_backward)
            updates = self._backward and wanted and input.requires_grad and region.take_first()
            if record is not None and updates:
                record.updates = True
        updates = record.updates if again else updates
        backward = of_grad if self._backward else None
        return _Call(of_input if forward else None, backward, state, region, updates)


class _QuantizeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, call: _Call) -> torch.Tensor:  # noqa: ANN401
        ctx.call = call
        return input.view_as(input) if call.forward is None else _quantized(input, call.forward)

    @staticmethod
    @run_eagerly
    @once(lambda _: "Quantize")
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # noqa: ANN401
        call: _Call = ctx.call
        if call.backward is None:
            return grad_output, None
        if call.region is not None and call.state is not None:
            call.region.queue.add(call.state, forward=False)
        grad_input = _quantized(grad_output, call.backward)
        if call.region is not None and call.updates:
            call.region.queue.update(forward=False)
        return grad_input, None


def _quantized(tensor: torch.Tensor, quantizer: Any) -> torch.Tensor:  # noqa: ANN401 - a quantizer
    if isinstance(tensor, QuantizedTensor):
        return tensor
    return quantize_result(tensor.contiguous(), quantizer, OPS, tensor.dtype)
