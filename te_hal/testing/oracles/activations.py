"""float64 oracles of the activation family (V1 to V3); gradients come from torch's autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.testing.oracles.bounded import Due, oracle

if TYPE_CHECKING:
    from collections.abc import Callable


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


_ACTIVATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": _gelu,
    "geglu": _gelu,
    "qgelu": _qgelu,
    "qgeglu": _qgelu,
    "relu": _relu,
    "reglu": _relu,
    "srelu": _srelu,
    "sreglu": _srelu,
    "silu": torch.nn.functional.silu,
    "swiglu": torch.nn.functional.silu,
    "glu": torch.sigmoid,
}
_GATED = frozenset({"geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu", "clamped_swiglu"})


def activated(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """The op's output for a float64 input, differentiable in it."""
    kind = given["activation"]
    if kind not in _GATED:
        return _ACTIVATED[kind](x)
    a, b = x.chunk(2, -1)
    if kind != "clamped_swiglu":
        return _ACTIVATED[kind](a) * b
    limit, alpha, offset = (_or(given[n], d) for n, d in (("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0)))
    # Unlike torch's clamp, which stops the gradient at NaN: NaN is not outside.
    a = torch.where(a > limit, limit, a)
    b = torch.where(b > limit, limit, torch.where(b < -limit, -limit, b)) + offset
    return a * torch.sigmoid(alpha * a) * b


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _halves(x: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes of the activated part and of the factor beside it."""
    if given["activation"] not in _GATED:
        return x.abs(), torch.ones_like(x)
    a, b = x.chunk(2, -1)
    return a.abs(), b.abs() + (1 if given["activation"] == "clamped_swiglu" else 0)


@oracle("activation_fwd")
def forward(given: dict[str, Any]) -> dict[str, Due]:
    """The formulas cancel where the function is small, so errors are relative to the input."""
    x = given["input"].double()
    found = activated(x, given)
    a, factor = _halves(x, given)
    # A sigmoid's exponent is as exact as its argument.
    return {"output": Due(found, found.abs() * (1 + a) + a.clamp(max=8.0) * factor)}


@oracle("bias_activation_fwd")
def biased(given: dict[str, Any]) -> dict[str, Due]:
    """As without a bias, of the sum; the sum is an fp32 one, whose own rounding is relative to its terms."""
    x = given["input"].double() + given["bias"].double()
    terms = given["input"].double().abs() + given["bias"].double().abs()
    found = _ACTIVATED[given["activation"]](x)
    return {"output": Due(found, found.abs() * (1 + terms) + terms.clamp(max=8.0) + terms * (x > 0))}


@oracle("bias_activation_bwd")
def biased_backward(given: dict[str, Any]) -> dict[str, Due]:
    """grad_output times the slope at the sum, and that summed over rows."""
    x, grad = given["input"].double() + given["bias"].double(), given["grad_output"].double()
    terms = given["input"].double().abs() + given["bias"].double().abs()
    gradient = grad * _slope(_ACTIVATED[given["activation"]], x)
    magnitude = grad.abs() * (1 + terms) ** 2
    due = {"grad_input": Due(gradient, magnitude)}
    if given["bias_grad"]:
        columns = gradient.shape[-1]
        due["grad_bias"] = Due(*(values.reshape(-1, columns).sum(0) for values in (gradient, magnitude)))
    return due


@oracle("activation_bwd")
def backward(given: dict[str, Any]) -> dict[str, Due]:
    """grad_output times the slope, element by element; a factor of 0 beside NaN gives NaN."""
    x, kind, grad = given["input"].double(), given["activation"], given["grad_output"].double()
    a, factor = _halves(x, given)
    if kind not in _GATED:
        return {"grad_input": Due(grad * _slope(_ACTIVATED[kind], x), grad.abs() * (1 + a) ** 2)}
    both = torch.cat([grad, grad], -1)
    if kind == "clamped_swiglu":
        slope = _slope(lambda values: activated(values, given), x, nan_stays=False)
        # Where a clamp took hold the gradient is 0, whatever it would be multiplied with (V3).
        limit, (first, second) = _or(given["limit"], 7.0), x.chunk(2, -1)
        held = torch.cat([first > limit, second.abs() > limit], -1)
        both, slope = both.masked_fill(held, 0.0), slope.masked_fill(held, 0.0)
    else:
        first, second = x.chunk(2, -1)
        slope = torch.cat([second * _slope(_ACTIVATED[kind], first), _ACTIVATED[kind](first)], -1)
    return {"grad_input": Due(both * slope, both.abs() * torch.cat([factor * (1 + a) ** 2, (1 + a) ** 2], -1))}


def _slope(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, nan_stays: bool = True
) -> torch.Tensor:
    """Of each element's result. ``nan_stays``: NaN at NaN, where torch's relu has none.

    gelu's is at its limits long before 64, and at infinity, where autograd would multiply infinity with zero.
    """
    near = x.clamp(-64.0, 64.0) if function is _gelu else x
    variable = near.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(variable).sum(), variable)
    return slope.masked_fill(x.isnan(), float("nan")) if nan_stays else slope
