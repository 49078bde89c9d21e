"""Activations in plain torch, in the dtype of what they get."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 2


def clamped_swiglu(a: torch.Tensor, b: torch.Tensor, limit: float = 7.0, alpha: float = 1.702) -> torch.Tensor:
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + 1.0)


PLAIN = {"gelu": gelu, "qgelu": qgelu, "relu": torch.relu, "srelu": srelu, "silu": silu}
OF_TWO_HALVES = {
    "geglu": lambda a, b: gelu(a) * b,
    "glu": lambda a, b: torch.sigmoid(a) * b,
    "qgeglu": lambda a, b: qgelu(a) * b,
    "reglu": lambda a, b: torch.relu(a) * b,
    "sreglu": lambda a, b: srelu(a) * b,
    "swiglu": lambda a, b: silu(a) * b,
    "clamped_swiglu": clamped_swiglu,
}


def in_plain_torch(activation: str, x: torch.Tensor) -> torch.Tensor:
    if activation in PLAIN:
        return PLAIN[activation](x)
    return OF_TWO_HALVES[activation](*x.chunk(2, -1))
