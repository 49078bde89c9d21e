"""NormParameters: settings and parameters of the norm inside a module: ``layer_norm_weight``, ``layer_norm_bias``."""

from __future__ import annotations

import torch

from te_hal.modules.call_checks import check_parameter
from te_hal.modules.norm_function import NormKey
from te_hal.schema.errors import ArgumentError

#: Transformer Engine's names to those of the ops.
_OPS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}

_WEIGHT, _BIAS = "layer_norm_weight", "layer_norm_bias"


def norm_op(where: str, normalization: object) -> str:
    """The op of a norm that is named as Transformer Engine names it.

    Raises:
        ArgumentError: an unknown name.
    """
    if not isinstance(normalization, str) or normalization not in _OPS:
        raise ArgumentError(
            f"{where}: normalization", got=repr(normalization), accepted=", ".join(map(repr, _OPS)), todo="correct it"
        )
    return _OPS[normalization]


class NormParameters:
    """Names and shapes of a norm's parameters; the parameters themselves are the module's.

    Args:
        op: "layernorm" or "rmsnorm"; the latter has no bias.
        size: of what is normalised.
    """

    def __init__(self, op: str, size: int) -> None:
        self.op, self.size = op, size

    def register(self, module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameters, without values; ``layer_norm_bias`` is None for RMSNorm."""
        for name in (_WEIGHT, _BIAS):
            made = name == _WEIGHT or self.op == "layernorm"
            values = torch.empty(self.size, dtype=dtype, device=device) if made else None
            module.register_parameter(name, None if values is None else torch.nn.Parameter(values))

    def fill(self, module: torch.nn.Module, *, zero_centered_gamma: bool) -> None:
        """Gamma to 1 (0 where it is zero-centered), beta to 0, in place."""
        with torch.no_grad():
            getattr(module, _WEIGHT).fill_(0.0 if zero_centered_gamma else 1.0)
            if self.op == "layernorm":
                getattr(module, _BIAS).zero_()

    def read(self, module: torch.nn.Module, label: str) -> dict[str, torch.Tensor | None]:
        """The parameters as they are now, by name; None where there is none.

        Raises:
            ArgumentError: one was replaced by another of a shape that does not fit.
        """
        found = {name: getattr(module, name) for name in (_WEIGHT, _BIAS)}
        for name, parameter in found.items():
            if parameter is not None:
                check_parameter(label, name, parameter, (self.size,))
        return found

    def key(self, dtype: torch.dtype, device: torch.device, epsilon: float, zero_centered_gamma: bool) -> NormKey:
        """What decides which kernels run."""
        return NormKey(self.op, dtype, device, epsilon, zero_centered_gamma)
