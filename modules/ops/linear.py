"""Linear: an op that is made of two, BasicLinear and Bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.arguments import REASONS
from te_hal.modules.ops.basic_linear import BasicLinear
from te_hal.modules.ops.bias import Bias
from te_hal.modules.ops.fused_operation import FusedOperation
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_REFUSED = declare(
    "ops.Linear",
    {
        "tensor_parallel_mode": None,
        "tensor_parallel_group": None,
        "sequence_parallel": False,
    },
    REASONS,
)

#: Of a parameter: which of the ops has it.
_OWNERS = {"weight": 0, "bias": 1}


class Linear(FusedOperation):
    """``input @ weight.T + bias``; weights start as torch.nn.Linear's do, the bias at 0.

    Its ops own the parameters: a state dict has ``basic_ops.0.weight`` and ``basic_ops.1.bias``. One with ``weight``
    and ``bias``, such as torch.nn.Linear's, loads too.

    Args:
        in_features, out_features: as BasicLinear.
        bias: have one.
        device: None: the current backend's.
        dtype: of the parameters; None: torch's default dtype.
        rng_state_tracker_function, accumulate_into_main_grad: as BasicLinear.
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel: of later features; anything but the default is
            refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: as BasicLinear.

    Attributes:
        weight: ``[out_features, in_features]``, of the first op.
        bias: ``[out_features]``, of the second; None without one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        refuse("Linear", locals(), _REFUSED)
        check_flags("Linear", {"bias": bias})
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        super().__init__([linear, *([Bias(out_features, device=device, dtype=dtype)] if bias else [])])

    @property
    def weight(self) -> torch.nn.Parameter:
        """The first op's."""
        weight: torch.nn.Parameter = self.basic_ops[0].weight  # type: ignore[assignment] # a parameter
        return weight

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The second op's."""
        bias: torch.nn.Parameter | None = self.basic_ops[1].bias if len(self.basic_ops) > 1 else None  # type: ignore[assignment] # a parameter
        return bias

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as torch's
        """Assigning ``weight`` or ``bias`` replaces the parameter of the op that owns it."""
        if name not in _OWNERS or "_modules" not in self.__dict__:
            super().__setattr__(name, value)
            return
        if _OWNERS[name] < len(self.basic_ops):
            setattr(self.basic_ops[_OWNERS[name]], name, value)
        elif value is not None:
            raise ArgumentError(
                "Linear: bias", got="a bias", accepted="None, as bias=False", todo="make the op with bias=True"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        for name, owner in _OWNERS.items():
            if prefix + name in state_dict and owner < len(self.basic_ops):
                state_dict.setdefault(f"{prefix}basic_ops.{owner}.{name}", state_dict[prefix + name])
                del state_dict[prefix + name]  # torch's load_state_dict passes a copy of the caller's
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
