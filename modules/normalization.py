"""Normalization: what LayerNorm and RMSNorm share. Arguments, parameters and the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from te_hal.dispatch import current_memo
from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import check_dtype, refuse_later
from te_hal.modules.device import parameter_device
from te_hal.modules.norm_function import NormFunction, NormKey, NormPlan, make_norm_plan
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.modules.transforms import refuse_transforms, run_eagerly
from te_hal.quantization import Float8Tensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

_T = TypeVar("_T")


class Normalization(OptionalExtraState, torch.nn.Module):
    """Base of LayerNorm and RMSNorm; see there for the arguments."""

    op: ClassVar[str]

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None,
        eps: float,
        sequence_parallel: bool | None,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        hidden_size: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        sm_margin: int | None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        later = {"sequence_parallel": sequence_parallel or None, "sm_margin": sm_margin or None}
        refuse_later(kind, later, dict.fromkeys(later))
        self.normalized_shape = _shape(kind, _one_of(kind, normalized_shape, hidden_size, "hidden_size"))
        self.eps = float(eps)
        self.zero_centered_gamma = zero_centered_gamma
        self._plans: dict[NormKey, NormPlan] = {}
        chosen = check_dtype(f"{kind}: dtype", _one_of(kind, dtype, params_dtype, "params_dtype", needed=False))
        where = parameter_device(device)
        self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=chosen, device=where))
        self.register_parameter("bias", None)
        if self.op == "layernorm":
            self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=chosen, device=where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gamma to 1 (0 where it is zero-centered), beta to 0, in place."""
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    @run_eagerly
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise over the trailing ``normalized_shape``.

        Args:
            input: ``[..., *normalized_shape]``.

        Returns:
            Same shape, in the activation dtype.

        Raises:
            ArgumentError: shape, dtype or device that does not fit.
        """
        kind = type(self).__name__
        refuse_transforms(kind)
        if not isinstance(input, torch.Tensor):
            raise ArgumentTypeError(kind, got=f"a {type(input).__name__}", accepted="a torch.Tensor", todo="pass one")
        trailing = tuple(input.shape[input.dim() - len(self.normalized_shape) :])
        if trailing != self.normalized_shape:
            raise ArgumentError(
                f"{kind}: input",
                got=f"shape {tuple(input.shape)}",
                accepted=f"[..., {', '.join(map(str, self.normalized_shape))}]",
                todo="check which layer feeds this one",
            )
        parameters = dict(self.named_parameters(recurse=False))
        dtype = activation_dtype(kind, input, **parameters)
        plain = input.dequantize() if isinstance(input, Float8Tensor) else input
        rows = cast_if_needed(plain, dtype).reshape(*_leading(input, self.normalized_shape), self.weight.numel())
        affine = [cast_if_needed(parameter, dtype).reshape(-1) for parameter in parameters.values()]
        output: torch.Tensor = NormFunction.apply(  # type: ignore[no-untyped-call]
            rows,
            affine[0],
            affine[1] if len(affine) > 1 else None,
            self._plan(dtype, input.device),
            self.eps,
            self.zero_centered_gamma,
        )
        return output.reshape(input.shape)

    def _plan(self, dtype: torch.dtype, device: torch.device) -> NormPlan:
        key = NormKey(self.op, dtype, device, self.zero_centered_gamma)
        plan = self._plans.get(key)
        if plan is None or plan.memo is not current_memo():
            plan = self._plans[key] = make_norm_plan(key)
        return plan

    def __getstate__(self) -> dict[str, object]:
        """Plans hold kernels of this process and are not pickled or copied."""
        return {**self.__dict__, "_plans": {}}

    def extra_repr(self) -> str:
        """Settings, for ``print(model)``."""
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _leading(input: torch.Tensor, normalized_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(input.shape[: input.dim() - len(normalized_shape)])


def _one_of(kind: str, value: _T | None, older: _T | None, older_name: str, *, needed: bool = True) -> _T | None:
    """The value, or the one given under Transformer Engine's older argument name."""
    if (value is None and older is None and needed) or (value is not None and older is not None and value != older):
        newer_name = "normalized_shape" if older_name == "hidden_size" else "dtype"
        raise ArgumentError(
            kind,
            got=f"{newer_name}={value!r}, {older_name}={older!r}",
            accepted=f"one of the two ({older_name} is the older name)",
            todo=f"pass {newer_name}",
        )
    return older if value is None else value


def _shape(kind: str, given: object) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, (list, tuple)) else (given,)  # torch.Size is a tuple
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ArgumentError(
            f"{kind}: normalized_shape", got=repr(given), accepted="a positive int or several", todo="correct it"
        )
    return sizes
