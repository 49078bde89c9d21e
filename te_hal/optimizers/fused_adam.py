"""FusedAdam: Adam and AdamW with Transformer Engine's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from te_hal.optimizers.fused_optimizer import MASTER, FusedOptimizer
from te_hal.optimizers.hyperparameters import check_dtype, check_number, refuse_settings
from te_hal.optimizers.scaled_state import STATE_DTYPES
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

_REFUSED = declare(
    "optimizers.FusedAdam",
    {"amsgrad": False, "capturable": False, "set_grad_none": None},
    {
        "amsgrad": "Transformer Engine refuses it, too; torch.optim.AdamW(amsgrad=True) has it",
        "capturable": "the step counts in Python, which a device graph does not replay",
        "set_grad_none": "Transformer Engine's older way of telling zero_grad(), to which set_to_none is passed",
    },
)
_REFUSED_IN_STEP = declare(
    "optimizers.FusedAdam.step",
    {"grad_scaler": None},
    {"grad_scaler": "grad_scaler.step(optimizer) does it: unscaling belongs to the scaler"},
)

_MASTER_DTYPES = (torch.float32, torch.float16)


class FusedAdam(FusedOptimizer):
    """AdamW by default; plain Adam with ``adam_w_mode=False``. All steps are computed in fp32.

    With gradient g, first and second moments m and v, and t steps done, this one included::

        g' = g + weight_decay * p                 (adam_w_mode=False only)
        m  = b1 * m + (1 - b1) * g'
        v  = b2 * v + (1 - b2) * g' * g'
        u  = (m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps)
        p  = p - lr * (u + weight_decay * p)      (no second term with adam_w_mode=False)

    t counts the steps of the group, as in Transformer Engine, whether or not a parameter had a gradient.

    Args:
        params: parameters or groups of them; plain, or quantized (te_hal.modules.quantized_model_init).
        lr, betas, eps, weight_decay: see above.
        amsgrad: refused by name.
        bias_correction: divide by ``1 - b ** t``.
        adam_w_mode: decouple weight decay from the gradient.
        capturable: refused by name.
        master_weights: keep an fp32 copy of every parameter that is not fp32, step it, and round (or quantize) it
            into the parameter. Without, the rounded parameter is where the next step starts.
        master_weight_dtype: fp32; fp16 with a scale.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments: fp32, bf16, fp16 with a scale, uint8 (E4M3) with a scale.
        use_decoupled_grad: read ``parameter.decoupled_grad`` instead of ``grad``.
        store_param_remainders: with master weights, keep for bf16 parameters the 16 bits that they lack instead of
            a copy: the master is exact, the parameter is rounded to nearest with ties away from zero.
        set_grad_none: refused by name.

    Raises:
        ArgumentError: a value out of its range, a flag that is no bool, a dtype that is none of the above.
        UnsupportedError: ``amsgrad``, ``capturable``, ``set_grad_none``.
    """

    saved_settings: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedAdam", locals(), _REFUSED)
        flags = {
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "master_weights": master_weights,
            "use_decoupled_grad": use_decoupled_grad,
            "store_param_remainders": store_param_remainders,
        }
        check_flags("FusedAdam", flags)
        check_dtype("FusedAdam: master_weight_dtype", master_weight_dtype, _MASTER_DTYPES)
        check_dtype("FusedAdam: exp_avg_dtype", exp_avg_dtype, STATE_DTYPES)
        check_dtype("FusedAdam: exp_avg_sq_dtype", exp_avg_sq_dtype, STATE_DTYPES)
        if store_param_remainders and (not master_weights or master_weight_dtype != torch.float32):
            raise ArgumentError(
                "FusedAdam: store_param_remainders",
                got=f"master_weights={master_weights}, master_weight_dtype={master_weight_dtype}",
                accepted="master_weights=True in torch.float32, which the remainders complete",
                todo="set both, or leave it out",
            )
        self.adam_w_mode = adam_w_mode
        dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        dtypes |= {MASTER: master_weight_dtype} if master_weights else {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        super().__init__(params, defaults, dtypes, remainders=store_param_remainders, attribute=attribute)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """See :meth:`FusedOptimizer.check_group`."""
        for name in ("lr", "eps", "weight_decay"):
            check_number(f"FusedAdam: {name}", group[name])
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:  # noqa: PLR2004 - a pair
            raise ArgumentError("FusedAdam: betas", got=repr(betas), accepted="two numbers", todo="correct it")
        for beta in betas:
            check_number("FusedAdam: betas", beta, below=1.0)
        check_flags("FusedAdam", {"bias_correction": group["bias_correction"]})
        refuse_settings("FusedAdam", group, {"amsgrad": False, "maximize": False})
        if group["weight_decay"]:  # torch.optim says so of each group
            refuse_settings("FusedAdam", group, {"decoupled_weight_decay": self.adam_w_mode})

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Make the state of one parameter, as its first step would: zero moments, and the master weight.

        Args:
            param: whose; what exists already is left as it is.
            store_param_remainders: as the optimizer was made.

        Raises:
            ArgumentError: another value than the optimizer was made with.
        """
        if store_param_remainders is not self.remainders:
            raise ArgumentError(
                "FusedAdam.initialize_state: store_param_remainders",
                got=repr(store_param_remainders),
                accepted=repr(self.remainders),
                todo="pass what the optimizer was made with",
            )
        self._start(param)

    def _start(self, param: torch.Tensor) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in self.state[param]:
                self._store(param, name, torch.zeros(param.shape, dtype=torch.float32, device=param.device))
        self._start_master(param)

    def step(self, closure: Callable[[], float] | None = None, grad_scaler: None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient, in place.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scaler: refused by name; ``grad_scaler.step(optimizer)`` works.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            UnsupportedError: ``grad_scaler``.
            ArgumentError: a sparse gradient, or one of another shape.
        """
        refuse("FusedAdam.step", {"grad_scaler": grad_scaler}, _REFUSED_IN_STEP)
        return super().step(closure)

    def _count_step(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def _step_chunk(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        for parameter in parameters:
            self._start(parameter)
        values = [self._value(parameter) for parameter in parameters]
        first = [self.get_unscaled_state(parameter, "exp_avg") for parameter in parameters]
        second = [self.get_unscaled_state(parameter, "exp_avg_sq") for parameter in parameters]
        self._update(group, values, gradients, (first, second))
        for parameter, value, m, v in zip(parameters, values, first, second, strict=True):
            self._store(parameter, "exp_avg", m)
            self._store(parameter, "exp_avg_sq", v)
            self._finish(parameter, value)

    def _update(
        self,
        group: dict[str, Any],
        values: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        """The formulas of the class, on fp32 lists; values and moments in place."""
        settings = AdamSettings(
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["step"],
            decoupled=self.adam_w_mode,
            bias_correction=group["bias_correction"],
        )
        adam_update(values, gradients, moments, settings)


class AdamSettings(NamedTuple):
    """What a step of Adam depends on besides tensors, as FusedAdam has it; ``step`` counts this one."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    bias_correction: bool


def adam_update(
    values: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    settings: AdamSettings,
) -> None:
    """A step by FusedAdam's formulas, on fp32 lists; values and moments in place."""
    lr, (beta1, beta2), eps, decay, step, decoupled, corrected = settings
    first, second = moments
    if decay and not decoupled:
        gradients = torch._foreach_add(gradients, values, alpha=decay)  # type: ignore[assignment] # noqa: SLF001
    torch._foreach_mul_(first, beta1)
    torch._foreach_add_(first, gradients, alpha=1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    denominator = torch._foreach_div(second, 1 - beta2**step if corrected else 1.0)  # noqa: SLF001
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, eps)
    if decay and decoupled:
        torch._foreach_mul_(values, 1 - lr * decay)
    size = lr / (1 - beta1**step if corrected else 1.0)
    torch._foreach_addcdiv_(values, first, denominator, value=-size)
