"""Normalization: what LayerNorm and RMSNorm share. Arguments, parameters and the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import REASONS, check_dtype, check_epsilon, check_tensor
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.norm_function import NormFunction, NormKey, NormPlan, make_norm_plan
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.recompute import recomputable
from te_hal.modules.state_dict import OptionalExtraState
from te_hal.modules.transforms import refuse_transforms, run_eagerly
from te_hal.quantization.autocast import note_module
from te_hal.quantization.quantized_tensor import dequantized
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_T = TypeVar("_T")

_REFUSED = declare("LayerNorm", {"sequence_parallel": None, "sm_margin": None}, REASONS)
declare("RMSNorm", {"sequence_parallel": None, "sm_margin": None}, REASONS)
declare("ops.LayerNorm", {"sm_margin": 0}, REASONS)
declare("ops.RMSNorm", {"sm_margin": 0}, REASONS)


class Normalization(OptionalExtraState, torch.nn.Module):
    """Base of LayerNorm and RMSNorm, which add the op and say what it computes.

    Args:
        normalized_shape: trailing sizes that are normalised together.
        eps: added under the root.
        sequence_parallel: of a later feature; True is refused.
        params_dtype: older name of ``dtype``.
        zero_centered_gamma: gamma is stored minus one, starts at 0, and the one is added in fp32.
        hidden_size: older name of ``normalized_shape``.
        device: None: the current backend's.
        dtype: of the parameters; None: torch's default dtype.
        sm_margin: for kernels that leave multiprocessors free; anything but None and 0 is refused.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: no shape, or two that differ; an ``eps`` that is negative or no number; a dtype that no kernel
            takes; no device.
    """

    op: ClassVar[str]

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        later = {"sequence_parallel": sequence_parallel or None, "sm_margin": sm_margin or None}
        refuse(kind, later, _REFUSED)
        check_flags(kind, {"zero_centered_gamma": zero_centered_gamma})
        self.normalized_shape = _shape(kind, _one_of(kind, normalized_shape, hidden_size, "hidden_size"))
        self.eps = check_epsilon(f"{kind}: eps", eps)
        self.zero_centered_gamma = zero_centered_gamma
        self._plans: PlanCache[NormKey, NormPlan] = PlanCache(make_norm_plan)
        chosen = check_dtype(f"{kind}: dtype", _one_of(kind, dtype, params_dtype, "params_dtype", needed=False))
        where = parameter_device(device, f"{kind}: device")
        self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=chosen, device=where))
        self.register_parameter("bias", None)
        if self.op == "layernorm":
            self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape, dtype=chosen, device=where))
        first_reset(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Gamma to 1 (0 where it is zero-centered), beta to 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    @run_eagerly
    @recomputable
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
        note_module()
        refuse_transforms(kind)
        self._check_input(kind, input)
        parameters = dict(self.named_parameters(recurse=False))
        dtype = activation_dtype(kind, input, **parameters)
        self._check_parameters(kind, parameters)
        plain = cast_if_needed(dequantized(input), dtype)
        rows = plain.reshape(*_leading(input, self.normalized_shape), self.weight.numel())
        affine = [cast_if_needed(parameter, dtype).reshape(-1) for parameter in parameters.values()]
        plan = self._plans.get(NormKey(self.op, dtype, input.device, self.eps, self.zero_centered_gamma))
        output: torch.Tensor = NormFunction.apply(  # type: ignore[no-untyped-call]
            rows, affine[0], affine[1] if len(affine) > 1 else None, plan
        )
        return output.reshape(input.shape)

    def _check_input(self, kind: str, given: object) -> None:
        input = check_tensor(kind, given)  # noqa: A001 - its name in messages
        trailing = tuple(input.shape[input.dim() - len(self.normalized_shape) :])
        if trailing != self.normalized_shape:
            raise ArgumentError(
                f"{kind}: input",
                got=f"shape {tuple(input.shape)}",
                accepted=f"[..., {', '.join(map(str, self.normalized_shape))}]",
                todo="check which layer feeds this one",
            )

    def _check_parameters(self, kind: str, parameters: Mapping[str, torch.Tensor]) -> None:
        """Bound kernels check no shapes, and parameters can be replaced."""
        for name, parameter in parameters.items():
            if parameter.shape != self.normalized_shape:
                raise ArgumentError(
                    f"{kind}: {name}",
                    got=f"shape {tuple(parameter.shape)}",
                    accepted=f"{self.normalized_shape}, as normalized_shape",
                    todo="make a new module for other sizes",
                )

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
