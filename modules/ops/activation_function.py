"""The autograd Function of an activation that runs by itself, and what it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import te_hal.ops
from te_hal.dispatch import current_memo, resolve
from te_hal.modules.once import once
from te_hal.modules.rows import as_result
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import Float8CurrentScalingQuantizer
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.activation_stage import ActivationKey


class ActivationPlan(NamedTuple):
    """What an activation runs.

    Attributes:
        key: what is computed.
        memo: dispatch's memo when it was bound.
        forward: of the input ``[..., F or 2F]``, gives ``[..., F]``.
        backward: of the result's gradient and the input, gives the input's gradient.
    """

    key: ActivationKey
    memo: object
    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_activation_plan(key: ActivationKey) -> ActivationPlan:
    """Bind the kernels of an activation that te_hal.ops has.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no.
    """
    memo, flags = current_memo(), {"activation": key.name, "out_dtype": key.dtype}
    given = {**dict(key.parameters), **flags}
    forward = resolve(Call("activation_fwd", key.device, {"input": key.dtype}, flags)).kernel
    kinds = {"grad_output": key.dtype, "input": key.dtype}
    backward = resolve(Call("activation_bwd", key.device, kinds, flags)).kernel
    return ActivationPlan(key, memo, partial(forward, **given), partial(backward, **given))


class ActivationFunction(torch.autograd.Function):
    """An activation, and its gradient; keeps the input."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        plan: ActivationPlan,
        keeps_quantized: bool,
        label: str,
    ) -> torch.Tensor:
        """Run it.

        Args:
            ctx: autograd's context.
            input: ``[..., F]`` or ``[..., 2F]``, contiguous.
            plan: the formula.
            keeps_quantized: keep the input in E4M3, scaled by its own amax.
            label: of the op, for messages.

        Returns:
            ``[..., F]`` in the input's dtype.
        """
        output = plan.forward(input)
        kept: torch.Tensor | QuantizedStorage = input
        if keeps_quantized and ctx.needs_input_grad[0]:
            quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
            kept = quantizer.quantize_storage(input, rowwise=True, columnwise=False)
        tensors, ctx.rebuilds = prepare_for_saving(kept)
        ctx.save_for_backward(*tensors)
        ctx.plan, ctx.label = plan, label
        return as_result(output, output.shape)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.label)
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The input's gradient, in its dtype; a quantized ``grad_output`` is dequantized."""
        (kept,) = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        plan: ActivationPlan = ctx.plan
        grad = dequantized(grad_output)
        if isinstance(kept, QuantizedStorage):
            kept = te_hal.ops.dequantize(kept, out_dtype=plan.key.dtype)
        return plan.backward(grad.contiguous(), kept), None, None, None
