"""Bias: y = x + bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.dispatch import current_memo, resolve
from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed, plain_input
from te_hal.modules.arguments import REASONS, check_dtype, check_size
from te_hal.modules.call_checks import check_parameter
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.once import once
from te_hal.modules.ops.input_checks import check_input
from te_hal.modules.ops.operation import BasicOperation, Part
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.recompute import recomputable
from te_hal.modules.rows import plain_rows
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.refusals import declare, refuse
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Callable

_REFUSED = declare("ops.Bias", {"tensor_parallel": False, "tensor_parallel_group": None}, REASONS)


class Bias(BasicOperation):
    """Add a vector to every row. Behind a BasicLinear in a Sequential, the product adds it (docs/numerics.md, G4).

    Args:
        size: of the last dimension.
        device: None: the current backend's.
        dtype: of the parameter; None: torch's default dtype.
        tensor_parallel, tensor_parallel_group: of a later feature; anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: a size that is no positive int; a dtype that no kernel takes; no device.
    """

    part: ClassVar[Part | None] = Part.BIAS

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: object = None,
    ) -> None:
        refuse("Bias", locals(), _REFUSED)
        super().__init__()
        self.size = check_size("Bias: size", size)
        where = parameter_device(device, "Bias: device")
        self.bias = torch.nn.Parameter(torch.empty(size, dtype=check_dtype("Bias: dtype", dtype), device=where))
        self._plans: PlanCache[tuple[torch.dtype, torch.device], _Plan] = PlanCache(_Plan)
        first_reset(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """To 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        with torch.no_grad():
            self.bias.zero_()

    @run_eagerly
    @recomputable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input + bias``, ``[..., size]``, rounded once to the activation dtype.

        Raises:
            ArgumentTypeError, ArgumentError: no tensor; a shape, dtype or device that does not fit.
        """
        check_input(self.label, input, self.size, "size")
        check_parameter(self.label, "bias", self.bias, (self.size,))
        dtype = activation_dtype(self.label, input, bias=self.bias)
        given, bias = plain_input(input, dtype), cast_if_needed(self.bias, dtype)
        output: torch.Tensor = _BiasFunction.apply(given, bias, self._plans.get((dtype, input.device)))  # type: ignore[no-untyped-call]
        return output

    def extra_repr(self) -> str:
        """Size, for ``print(model)``."""
        return f"size={self.size}"


class _Plan:
    """The bound kernel of the backward, for a dtype and a device; ``memo`` is dispatch's memo when it was bound."""

    def __init__(self, key: tuple[torch.dtype, torch.device]) -> None:
        dtype, device = key
        self.memo = current_memo()
        self.bias_grad: Callable[..., Any] = resolve(
            Call("bias_grad", device, {"grad_output": dtype}, {"out_dtype": dtype})
        ).kernel


class _BiasFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, bias: torch.Tensor, plan: _Plan) -> torch.Tensor:  # noqa: ANN401
        ctx.plan = plan
        return input + bias

    @staticmethod
    @run_eagerly
    @once(lambda _: "Bias")
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The gradient, and its fp32 sum over rows (docs/numerics.md, G5)."""
        rows, of_bias = plain_rows(grad_output), None
        if ctx.needs_input_grad[1]:
            of_bias = ctx.plan.bias_grad(rows, out_dtype=rows.dtype)
        return grad_output, of_bias, None
