"""FusedSGD: stochastic gradient descent with momentum, with Transformer Engine's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.optimizers.fused_optimizer import MASTER, FusedOptimizer
from te_hal.optimizers.hyperparameters import check_number, refuse_settings
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.optimizer import ParamsT

_REFUSED = declare(
    "optimizers.FusedSGD",
    {"materialize_master_grads": True, "set_grad_none": None},
    {
        "materialize_master_grads": "gradients are read in their own dtype; there is no second copy to leave out",
        "set_grad_none": "Transformer Engine's older way of telling zero_grad(), to which set_to_none is passed",
    },
)

_BUFFER = "momentum_buffer"


class FusedSGD(FusedOptimizer):
    """SGD, computed in fp32.

    With gradient g and momentum buffer b::

        g = g + weight_decay * p                    (before the momentum; after it with wd_after_momentum)
        b = g at first, then momentum * b + (1 - dampening) * g
        p = p - lr * b                              (nesterov: p - lr * (g + momentum * b))

    Args:
        params: parameters or groups of them; plain or quantized.
        lr, momentum, dampening, weight_decay, nesterov: see above.
        wd_after_momentum: add weight decay to the step instead of the gradient.
        materialize_master_grads: refused by name unless True.
        set_grad_none: refused by name.
        master_weights: keep an fp32 copy of every parameter that is not fp32, as FusedAdam does. (Transformer
            Engine's optimizer has no such argument.)

    Raises:
        ArgumentError: a value out of its range; ``nesterov`` without momentum or with dampening; a flag that is no
            bool.
        UnsupportedError: ``materialize_master_grads``, ``set_grad_none``.
    """

    saved_settings: ClassVar[tuple[str, ...]] = ("lr", "momentum", "dampening", "weight_decay", "nesterov")

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        refuse("FusedSGD", locals(), _REFUSED)
        check_flags("FusedSGD", {"wd_after_momentum": wd_after_momentum, "master_weights": master_weights})
        self.wd_after_momentum = wd_after_momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        dtypes = {_BUFFER: torch.float32} | ({MASTER: torch.float32} if master_weights else {})
        super().__init__(params, defaults, dtypes)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See :meth:`FusedOptimizer.check_group`."""
        for name in ("lr", "momentum", "dampening", "weight_decay"):
            check_number(f"FusedSGD: {name}", group[name])
        check_flags("FusedSGD", {"nesterov": group["nesterov"]})
        refuse_settings("FusedSGD", group, {"maximize": False})
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ArgumentError(
                "FusedSGD: nesterov",
                got=f"momentum={group['momentum']}, dampening={group['dampening']}",
                accepted="a momentum above 0 and no dampening",
                todo="correct one of the three",
            )

    def _step_chunk(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        for parameter in parameters:
            self._start_master(parameter)
        values = [self._value(parameter) for parameter in parameters]
        decay = group["weight_decay"]
        if decay and not self.wd_after_momentum:
            gradients = torch._foreach_add(gradients, values, alpha=decay)  # type: ignore[assignment] # noqa: SLF001
        if group["momentum"]:
            gradients = self._with_momentum(group, parameters, gradients)
        if decay and self.wd_after_momentum:
            gradients = torch._foreach_add(gradients, values, alpha=decay)  # type: ignore[assignment] # noqa: SLF001
        torch._foreach_add_(values, gradients, alpha=-group["lr"])
        for parameter, value in zip(parameters, values, strict=True):
            self._finish(parameter, value)

    def _with_momentum(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        momentum, going = group["momentum"], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if _BUFFER in self.state[parameter]:
                going.append((self.state[parameter][_BUFFER], gradient))
            else:
                self.state[parameter][_BUFFER] = gradient.clone()
        if going:
            buffers, later = [buffer for buffer, _ in going], [gradient for _, gradient in going]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, later, alpha=1 - group["dampening"])
        held = [self.state[parameter][_BUFFER] for parameter in parameters]
        if not group["nesterov"]:
            return held
        return list(torch._foreach_add(gradients, held, alpha=momentum))  # noqa: SLF001
