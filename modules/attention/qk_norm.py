"""Normalisation of queries and keys over the channels of a head, before or after they are rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_epsilon
from te_hal.modules.layernorm import LayerNorm
from te_hal.modules.rmsnorm import RMSNorm
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.modules.normalization import Normalization

_L2 = "L2Normalization"
_WITH_PARAMETERS: dict[str, type[Normalization]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class L2Norm(torch.nn.Module):
    """``x / sqrt(sum(x ** 2) + eps)`` over the last dimension, in fp32, rounded once; no parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``input``."""
        with torch.autocast(input.device.type, enabled=False):
            wide = input.float()
            return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(input.dtype)


def check_qk_norm(where: str, type_: object, eps: object) -> None:
    """Check the settings of a norm of queries and keys.

    Raises:
        ArgumentError: an unknown type; an eps that is negative or no number.
    """
    if type_ is not None and type_ not in (_L2, *_WITH_PARAMETERS):
        accepted = ", ".join(map(repr, (_L2, *_WITH_PARAMETERS))) + ", or None for no norm"
        raise ArgumentError(f"{where}: qk_norm_type", got=repr(type_), accepted=accepted, todo="correct it")
    check_epsilon(f"{where}: qk_norm_eps", eps)


def make_norms(
    type_: str | None, channels: int, eps: float, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """The norm of queries and the norm of keys, each with a gamma (and beta) of ``[channels]``.

    One module for both where it has no parameters; None without a type.
    """
    if type_ is None:
        return None, None
    if type_ == _L2:
        shared = L2Norm(eps)
        return shared, shared
    kind = _WITH_PARAMETERS[type_]
    return kind(channels, eps=eps, dtype=dtype, device=device), kind(channels, eps=eps, dtype=dtype, device=device)
