"""The activation functions and their slopes, on fp32 tensors (docs/numerics.md, rules V1-V3).

The formulas and their order of operations are Transformer Engine's, so that a cast of the fp32 result gives its bytes.
torch's own ``gelu(approximate="tanh")`` orders them otherwise and falls to zero earlier on the negative side.
NaN stays NaN in all of them; at an infinite input the formula's IEEE result stands, which may be NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_SQRT_2_OVER_PI = 0.79788456
_GELU_CUBIC = 0.044715
_GELU_STEEPNESS = 1.702

#: Beyond this magnitude tanh is exactly 1 in fp32; larger inputs would only overflow their square.
_GELU_SATURATED = 64.0


class Formula(NamedTuple):
    """A function and its derivative."""

    value: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    inner = x * (_SQRT_2_OVER_PI + _SQRT_2_OVER_PI * _GELU_CUBIC * (x * x))
    return x * (0.5 + 0.5 * torch.tanh(inner))


def _gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """``0.5 * x * ((1 - tanh * tanh) * inner_slope) + 0.5 * (1 + tanh)``, in place: new tensors cost as much again."""
    x = x.clamp(-_GELU_SATURATED, _GELU_SATURATED)
    square = x * x
    tanh = (_GELU_CUBIC * square).add_(1.0).mul_(_SQRT_2_OVER_PI * x).tanh_()
    inner_slope = square.mul_(3.0 * _SQRT_2_OVER_PI * _GELU_CUBIC).add_(_SQRT_2_OVER_PI)
    falling = (1.0 - tanh * tanh).mul_(inner_slope).mul_(x.mul_(0.5))
    return falling.add_(tanh.add_(1.0).mul_(0.5))


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1.0 - sigmoid)


def swish(steepness: float) -> Formula:
    """``x * sigmoid(steepness * x)``: silu at 1, qgelu at 1.702."""

    def value(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(steepness * x)

    def slope(x: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(steepness * x)
        return steepness * x * (sigmoid * (1.0 - sigmoid)) + sigmoid

    return Formula(value, slope)


def _relu_slope(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), x, (x > 0.0).to(x.dtype))


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def _srelu_slope(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * torch.relu(x)


FORMULAS: dict[str, Formula] = {
    "gelu": Formula(_gelu, _gelu_slope),
    "qgelu": swish(_GELU_STEEPNESS),
    "relu": Formula(torch.relu, _relu_slope),
    "srelu": Formula(_srelu, _srelu_slope),
    "silu": swish(1.0),
    "sigmoid": Formula(torch.sigmoid, _sigmoid_slope),
}

#: What each gated kind does to its first half.
GATES = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}
