"""prepare_for_saving and its way back, in an autograd Function of one's own."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te


def quantized() -> te.QuantizedStorage:
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    return quantizer(torch.randn(16, 32)).quantized_storage


class Scaled(torch.autograd.Function):
    """``x * sum(weight)``, which keeps a quantized weight."""

    @staticmethod
    def forward(ctx, x, weight):
        tensors, ctx.tensor_objects = te.prepare_for_saving(weight, None, x)
        ctx.save_for_backward(*tensors, x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (weight, nothing, x), behind = te.restore_from_func_ctx(ctx, return_saved_tensors=True)
        assert nothing is None
        assert [tensor is x for tensor in behind] == [True]
        ctx.found.append(weight)
        return gradient, None


def test_what_a_function_kept_comes_back_once_with_what_is_behind():
    storage, found = quantized(), []
    x = torch.ones(2, requires_grad=True)
    y = Scaled.apply(x, storage)
    y.grad_fn.found = found
    y.sum().backward(retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found[0].tensors()[:2], storage.tensors()[:2], strict=True))
    assert (found[0].shape, found[0].dtype) == (storage.shape, storage.dtype)
    with pytest.raises(ValueError, match="restore_from_func_ctx: ctx: got no tensor_objects"):
        y.sum().backward()


def test_too_few_tensors_are_refused():
    tensors, rebuilds = te.prepare_for_saving(quantized(), torch.ones(1))
    with pytest.raises(ValueError, match="got 4 tensors for 2 values; accepted: all that prepare_for_saving gave"):
        te.restore_from_saved(rebuilds, tensors[:-1])
    with pytest.raises(ValueError, match="return_saved_tensors"):
        te.restore_from_saved(rebuilds, tensors, return_saved_tensors=1)
