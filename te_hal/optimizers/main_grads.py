"""Gradients that an optimizer does not read because a module wrote them into ``main_grad``: said once, by name."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def warn_of_main_grads(
    where: str,
    number: int,
    group: Mapping[str, Any],
    gradients: Mapping[torch.Tensor, torch.Tensor | None],
    known: Collection[torch.Tensor],
    attribute: str,
) -> bool:
    """Warn where a group's step passes over a ``main_grad`` that is not zero.

    That is so where the gradient is missing, or where it is the zeros that stand in for it beside
    ``grad_added_to_main_grad``; the latter is looked at before a parameter's first step only.

    Args:
        where: the optimizer.
        number: of the group.
        group: with its parameters, and their names where it has them.
        gradients: by parameter, as the step will use them.
        known: parameters that have been stepped.
        attribute: where gradients are read.

    Returns:
        Whether there was something to warn of.
    """
    parameters = group["params"]
    missed = [
        place
        for place, parameter in enumerate(parameters)
        if _is_passed_over(parameter, gradients[parameter], parameter in known)
    ]
    if missed:
        place, more = missed[0], f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        names = group.get("param_names")
        first = f"{names[place] if names else f'{place} of group {number}'} (shape {tuple(parameters[place].shape)})"
        warnings.warn(
            f"{where}.step: got a gradient in main_grad, and none in {attribute}, of parameter {first}{more}, which"
            f" the step does not train with it; accepted: gradients in {attribute}; before each step set"
            " parameter.grad = parameter.main_grad.to(parameter.dtype), or, with FusedAdam(use_decoupled_grad=True),"
            " parameter.decoupled_grad = parameter.main_grad",
            stacklevel=6,
        )
    return bool(missed)


def _is_passed_over(parameter: torch.Tensor, gradient: torch.Tensor | None, stepped: bool) -> bool:
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor) or main_grad.is_meta:
        return False
    if gradient is None:
        return bool(main_grad.any())
    stand_in = not stepped and getattr(parameter, "grad_added_to_main_grad", False) and not bool(gradient.any())
    return stand_in and bool(main_grad.any())
