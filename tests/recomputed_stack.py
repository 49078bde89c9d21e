"""Layers of which some run inside a checkpointed function, and training steps of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.quantization.quantizer_request import DelayedScalingRequest

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPES: dict[str, Callable[[], recipe.Recipe]] = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "mtfp8": recipe.MTFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=requests),
    "hybrid": lambda: recipe.CustomRecipe(qfactory=hybrids),
    "override": lambda: recipe.Float8CurrentScaling(backward_override="dequantized"),
}
STEPS, SIZE = 2, 32


def requests(role: object) -> object:
    """Delayed scaling for some slots, current scaling for the rest."""
    asks = getattr(role, "tensor_type", None) in ("input", "grad_output")
    return DelayedScalingRequest(amax_history_len=4) if asks else factories.current_scaling_factory(role)


def hybrids(role: object) -> object:
    """Codes of MXFP8 forward, plain products backward."""
    if getattr(role, "tensor_type", None) not in ("input", "weight"):
        return te.IdentityQuantizer()
    rows = factories.mxfp8_factory(role)
    return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer())


#: How a function is called.
WAYS: dict[str, Callable[..., Any]] = {
    "te": te.checkpoint,
    "te_not_reentrant": lambda function, x: te.checkpoint(function, x, use_reentrant=False),
    "torch": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True),
    "torch_not_reentrant": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False),
}


class Plan(NamedTuple):
    """What a training does.

    Attributes:
        inside: from which layer to which the function reaches.
        opens: the function opens an autocast of its own ("inside"), stands in one ("outside"), or both.
        order: of the backwards of two microbatches, whose forwards both come before.
        flags: ``is_first_microbatch`` of these.
        fuses: gradients go into main_grad.
    """

    inside: tuple[int, int] = (1, 3)
    opens: str = "outside"
    order: tuple[int, ...] = (0, 1)
    flags: tuple[bool | None, ...] = (None, None)
    fuses: bool = False


MIDDLE = Plan()


def layers(*, fuses: bool = False, mlp: bool = True) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    given = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": fuses}
    made = [
        te.Linear(SIZE, SIZE, **given),
        (te.LayerNormMLP if mlp else te.LayerNormLinear)(SIZE, SIZE, **given),
        te.LayerNormLinear(SIZE, SIZE, **given),
        te.Linear(SIZE, SIZE, **given),
    ]
    return torch.nn.ModuleList(made)


def train(way: str | None, chosen: recipe.Recipe | None, plan: Plan = MIDDLE) -> list[torch.Tensor]:
    """Outputs, gradients and scaling states of some steps; ``way`` None: without recompute."""
    model, found = layers(fuses=plan.fuses, mlp=getattr(chosen, "backward_override", None) is None), []
    for parameter in model.parameters():
        parameter.main_grad = torch.full(parameter.shape, 7.0)  # that the first microbatch overwrites
    for step in range(STEPS):
        outputs = []
        for number, flag in enumerate(plan.flags):
            generator = torch.Generator().manual_seed(10 * step + number)
            x = (torch.randn(SIZE, SIZE, generator=generator) * (1 + step)).to(torch.bfloat16).requires_grad_()
            outputs.append((x, _forward(model, x, way, chosen, plan, flag)))
        for number in plan.order:
            x, y = outputs[number]
            y.float().square().mean().backward()
            found += [y.detach(), x.grad]
        for parameter in model.parameters():
            grads = (parameter.grad, parameter.main_grad)
            found += [grad.clone() for grad in grads if grad is not None]
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.sub_(parameter.grad)
            parameter.grad = None
        found += [layer.get_extra_state() for layer in model]
    return found


def _forward(
    model: torch.nn.ModuleList,
    x: torch.Tensor,
    way: str | None,
    chosen: recipe.Recipe | None,
    plan: Plan,
    flag: bool | None,
) -> torch.Tensor:
    def autocast(where: str) -> Any:
        return te.autocast(recipe=chosen) if chosen is not None and plan.opens in (where, "both") else nullcontext()

    first, behind = plan.inside

    def inside(h: torch.Tensor) -> torch.Tensor:
        with autocast("inside"):
            for layer in model[first:behind]:
                h = layer(h, is_first_microbatch=flag)
        return h

    with autocast("outside"):
        for layer in model[:first]:
            x = layer(x, is_first_microbatch=flag)
        x = inside(x) if way is None else WAYS[way](inside, x)
        for layer in model[behind:]:
            x = layer(x, is_first_microbatch=flag)
    return x


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
