"""The autograd Function of GroupedLinear: the products of a linear layer for each group of rows, each by its plan."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules import linear_steps
from te_hal.modules.main_grad import PART_OF, asked_for, gradient_for_autograd, main_grad_of, should_accumulate
from te_hal.modules.once import once
from te_hal.modules.rows import as_result, plain_rows
from te_hal.modules.saved import prepare_for_saving, restore_from_saved
from te_hal.modules.transforms import run_eagerly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand

    Gradients = list[torch.Tensor | None]


class GroupedCall(NamedTuple):
    """What forward and backward of one call share. The graph holds it, so it holds no quantized data.

    Attributes:
        products: one call per group; the first one's plan tells the input's gradient and ends the backward.
        splits: rows of each group.
        stacked: the weights are one parameter, the ``parameter`` of every product.
        dgrad_out: ``[rows, in_features]`` of the caller, which gets the input's gradient; or None.
    """

    products: tuple[LinearCall, ...]
    splits: tuple[int, ...]
    stacked: bool
    dgrad_out: torch.Tensor | None

    def slices(self) -> list[slice]:
        """Where each group's rows lie."""
        ends = [0]
        for size in self.splits:
            ends.append(ends[-1] + size)
        return [slice(start, end) for start, end in pairwise(ends)]


class GroupedLinearFunction(torch.autograd.Function):
    """``y[g] = x[g] @ weight[g].T + bias[g]`` for consecutive groups g of rows, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context
        input: torch.Tensor,
        out: torch.Tensor | None,
        quantized_weights: Sequence[Operand] | None,
        call: GroupedCall,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """Run fprop of every group that has rows.

        Args:
            ctx: autograd's context.
            input: ``[..., in_features]``; rows beyond the last group belong to none.
            out: ``[rows, out_features]`` of the caller, written in place, whose rows of no group stay as they are.
            quantized_weights: what the gemms read under FP8, with the copies that the plans make.
            call: the rest.
            parameters: the weights ``[out_features, in_features]`` in the activation dtype, and as many biases or
                none.

        Returns:
            ``[..., out_features]`` in the activation dtype, 0 in rows of no group; ``out`` itself where given.
        """
        count = len(call.products)
        weights: Sequence[Operand] = parameters[:count] if quantized_weights is None else quantized_weights
        biases = parameters[count:] or (None,) * count
        rows = plain_rows(input)
        result = out
        if out is not None:
            ctx.mark_dirty(out)
        if result is None:
            result = rows.new_empty(rows.shape[0], parameters[0].shape[0], dtype=call.products[0].plan.key.dtype)
            result[sum(call.splits) :].zero_()
        inputs, kept_weights = [], []
        for number, (product, place) in enumerate(zip(call.products, call.slices(), strict=True)):
            weight = weights[number]
            part, plan, kept = rows[place], product.plan, None
            if len(part):
                operand = linear_steps.input_operand(part, product)
                linear_steps.fprop(operand, weight, biases[number], plan, result[place])
                kept = linear_steps.kept_input(operand, plan, part)
            inputs.append(kept)
            kept_weights.append(linear_steps.kept_weight(weight, plan, parameters[number]) if len(part) else None)
        tensors, ctx.rebuilds = prepare_for_saving(*inputs, *kept_weights)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.input_shape, ctx.with_biases = call, input.shape, len(parameters) > count
        return result if out is not None else as_result(result, (*input.shape[:-1], result.shape[-1]))

    @staticmethod
    @run_eagerly
    @once(lambda ctx: ctx.call.products[0].module)
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run dgrad, wgrad and the bias gradient of every group, as far as they are asked for.

        In place: as LinearFunction, and ``dgrad_out``. A group without rows has gradients of zeros; its ``main_grad``
        stays as it is, or becomes zeros where this backward overwrites it.

        Args:
            ctx: autograd's context.
            grad_output: ``[..., out_features]``.

        Returns:
            Gradients in the activation dtype, None where not asked for: input, 0 in rows of no group, or
            ``dgrad_out``; None three times; weights and biases.

        Raises:
            StateError: a ``main_grad`` is gone or does not fit any more.
        """
        call: GroupedCall = ctx.call
        count, key = len(call.products), call.products[0].plan.key
        saved = restore_from_saved(ctx.rebuilds, ctx.saved_tensors)
        gradients = plain_rows(grad_output)
        grad_input = None
        if key.dgrad:
            grad_input = _input_gradient(call, (len(gradients), ctx.input_shape[-1]), gradients)
        grad_weights: Gradients = []
        grad_biases: Gradients = []
        products = _products_of_stacked(call) if call.stacked else call.products
        for number, (product, place) in enumerate(zip(products, call.slices(), strict=True)):
            part = gradients[place]
            if len(part):
                grad, grad_bias = linear_steps.grad_operand(part, product)
                grad_weight = None
                if grad is not None:
                    into = None if grad_input is None else grad_input[place]
                    linear_steps.dgrad(grad, saved[count + number], product.plan, into)
                    grad_weight = linear_steps.wgrad(grad, saved[number], product)
            else:
                grad_weight, grad_bias = _gradients_of_nothing(product)
            grad_weights.append(grad_weight)
            grad_biases.append(grad_bias)
        linear_steps.end_backward(call.products[0])
        if call.stacked and key.main_grad_dtype is not None and call.products[0].delayed is None:
            grad_weights = _gradients_of_stacked(call)
        if grad_input is not None and call.dgrad_out is None:
            grad_input = grad_input.view(ctx.input_shape)
        return grad_input, None, None, None, *grad_weights, *(grad_biases if ctx.with_biases else ())


def _input_gradient(call: GroupedCall, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """What the groups' dgrads write into."""
    if call.dgrad_out is not None:
        return call.dgrad_out
    made = like.new_empty(shape, dtype=call.products[0].plan.key.dtype)
    made[sum(call.splits) :].zero_()
    return made


def _gradients_of_nothing(product: LinearCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of weight and bias where no row belongs to a group: a sum of nothing."""
    key, weight = product.plan.key, product.parameter
    shape = weight.shape[-2:]
    grad_bias = torch.zeros(shape[:1], dtype=key.dtype, device=key.device) if key.bias_grad else None
    if not key.wgrad:
        return None, grad_bias
    if product.delayed is None:
        unasked = key.main_grad_dtype is not None and not asked_for(weight)
        return None if unasked else _weight_gradient_of_nothing(product), grad_bias
    # It waits like that of any other group, so that each group's oldest belongs to one backward.
    product.delayed.put(partial(_left_for_later, product))
    return None, grad_bias


def _weight_gradient_of_nothing(product: LinearCall) -> torch.Tensor | None:
    """Zeros for autograd, or none into main_grad, which becomes zeros where this gradient overwrites it."""
    key, weight = product.plan.key, product.parameter
    if key.main_grad_dtype is None:
        return torch.zeros(weight.shape[-2:], dtype=key.dtype, device=key.device)
    main_grad = main_grad_of(product.module, weight, dtype=key.main_grad_dtype)
    if not should_accumulate(weight, product.first_microbatch):
        main_grad.zero_()
    return gradient_for_autograd(weight, key.dtype)


def _left_for_later(product: LinearCall) -> torch.Tensor | None:
    gradient = _weight_gradient_of_nothing(product)
    return gradient if product.plan.key.main_grad_dtype is None else None  # no hooks of autograd's run any more


def _products_of_stacked(call: GroupedCall) -> tuple[LinearCall, ...]:
    """The products with the part of the stacked weight that is theirs as their parameter, main_grad included."""
    stacked, key = call.products[0].parameter, call.products[0].plan.key
    parts = stacked.detach().unbind(0)
    if key.main_grad_dtype is not None:
        main_grads = main_grad_of(call.products[0].module, stacked, dtype=key.main_grad_dtype).unbind(0)
        for part, main_grad in zip(parts, main_grads, strict=True):
            setattr(part, PART_OF, stacked)
            part.main_grad = main_grad  # type: ignore[attr-defined] # where wgrad looks for it
            part.overwrite_main_grad = getattr(stacked, "overwrite_main_grad", False)  # type: ignore[attr-defined]
    return tuple(product._replace(parameter=part) for product, part in zip(call.products, parts, strict=True))


def _gradients_of_stacked(call: GroupedCall) -> Gradients:
    """What autograd gets for the parts of a stacked weight whose main_grad has the gradient."""
    first = call.products[0]
    if not asked_for(first.parameter):
        return [None] * len(call.products)
    gradient = gradient_for_autograd(first.parameter, first.plan.key.dtype)
    return [None] * len(call.products) if gradient is None else list(gradient.unbind(0))
