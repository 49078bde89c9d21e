"""The two orders of a gated weight's rows."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te

SHAPES = [(12,), (12, 5), (12, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_blocks_of_both_halves_take_turns_and_come_back(shape, size):
    tensor = torch.randn(shape, requires_grad=True)
    gate, linear = tensor[:6].split(size), tensor[6:].split(size)
    expected = torch.cat([block for pair in zip(gate, linear, strict=True) for block in pair])
    found = te.interleave_glu_tensor(tensor, size)
    assert torch.equal(found, expected)
    assert torch.equal(te.deinterleave_glu_tensor(found, size), tensor)
    assert found.data_ptr() != tensor.data_ptr()
    weights = torch.randn(shape)
    (gradient,) = torch.autograd.grad((found * weights).sum(), tensor)
    assert torch.equal(gradient, te.deinterleave_glu_tensor(weights, size))


def test_a_gated_product_gives_the_same_from_either_order():
    weight, x = torch.randn(16, 8), torch.randn(4, 8)
    turned = x @ te.interleave_glu_tensor(weight, 4).t()
    back = te.deinterleave_glu_tensor(turned.t(), 4).t()
    assert torch.allclose(back, x @ weight.t())


@pytest.mark.parametrize("function", [te.interleave_glu_tensor, te.deinterleave_glu_tensor])
@pytest.mark.parametrize("wrong", [0, -2, 4, True, 2.0, None], ids=str)
def test_a_block_that_does_not_divide_a_half_is_refused(function, wrong):
    with pytest.raises(ValueError, match=rf"{function.__name__}: got shape \(12,\), interleave_size="):
        function(torch.zeros(12), wrong)
    with pytest.raises(ValueError, match=r"shape \(\)"):
        function(torch.tensor(1.0), 1)
    with pytest.raises(TypeError, match="got a list"):
        function([1.0], 1)
