"""Case B19: the backward of a linear layer in parts: products without a bias, its gradient apart, gelu's derivative.

Held against float64 autograd of the same formula.
"""

import pytest
import torch

import te_hal.modules as te
from te_hal import ops
from te_hal.schema.errors import ArgumentError

#: The report's input: rows in two leading dimensions.
ROWS, IN, OUT = (2, 3), 16, 24


def operands() -> tuple[torch.Tensor, ...]:
    """Input [2, 3, 16], weight [24, 16], bias [24] and grad_output [2, 3, 24]; fp32."""
    shapes = ((*ROWS, IN), (OUT, IN), (OUT,), (*ROWS, OUT))
    return tuple(torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes))


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double().requires_grad_() for t in tensors]


def test_the_gradients_of_gelu_of_a_linear_layer_are_those_of_autograd() -> None:
    x, weight, bias, grad = operands()
    rows = x.reshape(-1, IN)
    before = ops.gemm(rows, weight, bias=bias)
    grad_before = ops.activation_bwd(grad.reshape(-1, OUT), before, activation="gelu")
    grad_input = ops.gemm(grad_before, weight, layout="dgrad")
    grad_weight = ops.gemm(grad_before, rows, layout="wgrad")
    grad_bias = ops.bias_grad(grad_before)
    a, w, b = wide(x, weight, bias)
    output = torch.nn.functional.gelu(torch.nn.functional.linear(a, w, b), approximate="tanh")
    due = torch.autograd.grad(output, (a, w, b), grad.double())
    for found, right in zip((grad_input.view(x.shape), grad_weight, grad_bias), due, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["dgrad", "wgrad"])
def test_a_product_of_the_backward_takes_no_bias(layout) -> None:
    x, weight, bias, grad = operands()
    a, b = (grad.reshape(-1, OUT), weight) if layout == "dgrad" else (grad.reshape(-1, OUT), x.reshape(-1, IN))
    with pytest.raises(ArgumentError, match="a bias goes with layout 'fprop' only"):
        ops.gemm(a, b, bias=bias[: b.shape[-1]] if layout == "dgrad" else bias, layout=layout)


@pytest.mark.parametrize("layout", ["fprop", "dgrad", "wgrad"])
def test_three_dimensions_are_refused_and_never_flattened(layout) -> None:
    x, weight, _, grad = operands()
    with pytest.raises(ArgumentError, match=r"got a .*\(2, 3, .*accepted: a \[M, "):
        ops.gemm(x if layout == "fprop" else grad, x if layout == "wgrad" else weight, layout=layout)


def test_a_layer_keeps_leading_dimensions_in_its_output_and_gradient() -> None:
    x, weight, bias, grad = operands()
    layer = te.Linear(IN, OUT)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert (y.shape, x.grad.shape) == ((*ROWS, OUT), (*ROWS, IN))
    a, w, b = wide(x.detach(), weight, bias)
    due = torch.autograd.grad(torch.nn.functional.linear(a, w, b), (a, w, b), grad.double())
    for found, right in zip((x.grad, layer.weight.grad, layer.bias.grad), due, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
