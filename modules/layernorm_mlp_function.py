"""The autograd Function of LayerNormMLP: a norm, a product, an activation, and a second product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules import linear_steps
from te_hal.modules.activation_stage import activate, activation_backward
from te_hal.modules.norm_stage import calibrate, normalise, through_norm
from te_hal.modules.once import once
from te_hal.modules.rows import as_result, plain_rows
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from te_hal.modules.activation_stage import ActivationStage
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.norm_stage import NormStage
    from te_hal.quantization import Quantizer
    from te_hal.schema.storage import QuantizedStorage


class LayerNormMLPCall(NamedTuple):
    """What forward and backward of one call share.

    Attributes:
        norm: the norm.
        fc1: the first product.
        activation: between the two.
        fc2: the second product.
        returns_norm: the norm's result is returned as well.
        calibrates: record the amax of what the products read; None each unless calibrating.
        leaves_out_fc2: nobody reads the output, which is left unwritten.
    """

    norm: NormStage
    fc1: LinearCall
    activation: ActivationStage
    fc2: LinearCall
    returns_norm: bool
    calibrates: tuple[Quantizer | None, Quantizer | None]
    leaves_out_fc2: bool = False


class LayerNormMLPFunction(torch.autograd.Function):
    """``y = activation(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias``, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        fc1_weight: torch.Tensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: torch.Tensor,
        fc2_bias: torch.Tensor | None,
        quantized: tuple[QuantizedStorage | None, QuantizedStorage | None],
        call: LayerNormMLPCall,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run norm, fc1, activation and fc2.

        Args:
            ctx: autograd's context.
            input: ``[..., H]``, plain, in the activation dtype, as all parameters.
            gamma: ``[H]``.
            beta: the same; None means RMSNorm.
            fc1_weight: ``[F, H]``, ``[2F, H]`` with a gated activation.
            fc1_bias: ``[F]`` or ``[2F]``, or None.
            fc2_weight: ``[H, F]``.
            fc2_bias: ``[H]`` or None.
            quantized: both weights as the gemms read them under FP8.
            call: the rest.

        Returns:
            ``[..., H]``; with ``returns_norm`` also the norm's result.
        """
        fc1, fc2 = call.fc1.plan, call.fc2.plan
        weights = [w if q is None else q for q, w in zip(quantized, (fc1_weight, fc2_weight), strict=True)]
        later = fc1_bias if call.activation.key.adds_bias else None
        rows = plain_rows(input)
        normed = normalise(rows, gamma, beta, call.norm, call.fc1)
        calibrate(call.calibrates[0], normed.output)
        result = linear_steps.fprop(normed.operand, weights[0], None if fc1.key.bias_dtype is None else fc1_bias, fc1)
        activated, _ = activate(result, later, call.activation, call.fc2)
        calibrate(call.calibrates[1], activated if isinstance(activated, torch.Tensor) else None)
        if call.leaves_out_fc2:
            output = rows.new_empty(rows.shape[0], fc2_weight.shape[0], dtype=fc2.key.dtype)
        else:
            output = linear_steps.fprop(activated, weights[1], fc2_bias, fc2)
        kept, returned = linear_steps.kept_input(normed.operand, fc1), None
        if call.returns_norm and normed.output is not None:
            returned = as_result(normed.output, input.shape)
            kept = returned if kept is normed.output else kept  # so that a later write to it is noticed
        tensors, ctx.rebuilds = prepare_for_saving(
            kept,
            linear_steps.kept_weight(weights[0], fc1),
            linear_steps.kept_input(activated, fc2),
            linear_steps.kept_weight(weights[1], fc2),
            *((result, later) if fc2.key.dgrad else (None, None)),
            *((rows, gamma, *normed.statistics) if fc1.key.dgrad else ()),
        )
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape = call, input.shape
        y = as_result(output, (*input.shape[:-1], output.shape[-1]))
        return y if returned is None else (y, returned)

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.call.fc1.module)
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_output: torch.Tensor,
        grad_normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the backward of fc2, activation, fc1 and norm, as far as it is asked for.

        In place: as LinearFunction.backward.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., H]`` in the output's dtype, or a Float8Tensor.
            grad_normed: of the norm's result where that was returned.

        Returns:
            Gradients in the activation dtype, None where not asked for: input ``[..., H]``, gamma, beta, fc1_weight and
            fc2_weight (None where main_grad has them), their biases; None for the rest.

        Raises:
            StateError: a ``main_grad`` is gone or does not fit any more.
        """
        call: LayerNormMLPCall = ctx.call
        saved: list[Any] = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        fc1_input, fc1_weight, fc2_input, fc2_weight, result, later, *of_norm = saved
        grad, grad_fc2_bias = linear_steps.grad_operand(grad_output, call.fc2)
        grad_fc2_weight = product = None
        if grad is not None:
            grad_fc2_weight = linear_steps.wgrad(grad, fc2_input, call.fc2)
            product = linear_steps.dgrad(grad, fc2_weight, call.fc2.plan)
        of_norm_grads: tuple[torch.Tensor | None, ...] = (None, None, None)
        grad_fc1_weight = grad_fc1_bias = None
        if product is not None:
            grad, grad_fc1_bias = activation_backward(product, result, later, call.activation, call.fc1)
            del product, result, fc2_input
            if grad is not None:
                grad_fc1_weight = linear_steps.wgrad(grad, fc1_input, call.fc1)
                product = linear_steps.dgrad(grad, fc1_weight, call.fc1.plan)
                if product is not None:
                    of_norm_grads = through_norm(product, grad_normed, of_norm, call.norm.norm, ctx.input_shape)
        linear_steps.end_backward(call.fc1)
        return *of_norm_grads, grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias, None, None
