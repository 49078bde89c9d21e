"""Reasons that hold for every kind of module, and how parameters come into the new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from te_hal.quantization.operand_formats import Formats

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def reason_to_stay(module: torch.nn.Module) -> str | None:
    """Why a module of a known class cannot be replaced at all; None where nothing speaks against it."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks, which a new module would lose"
    if "forward" in vars(module):
        return "its forward was replaced"
    parameters = dict(module.named_parameters(recurse=False))
    odd = [name for name, parameter in parameters.items() if type(parameter) is not torch.nn.Parameter]
    if odd:
        return f"{odd[0]} is a {type(parameters[odd[0]]).__name__}"
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        return "its parameters have several dtypes"
    if dtypes and not dtypes & set(FLOATS):
        return f"its parameters are {next(iter(dtypes))}; te_hal's modules have fp32, fp16 or bf16"
    return None


def reason_against_fp8(shape: tuple[int, ...], formats: Formats) -> str | None:
    """Why a weight of ``[out_features, in_features]`` cannot be multiplied under the recipe; None where it can."""
    try:
        check_fp8_shape("Linear", "weight", shape, formats, ("out_features", "in_features"))
    except ArgumentError as error:
        return f"{error.accepted}: the recipe's products do not take its {tuple(shape)} weight"
    return None


def hand_over(new: torch.nn.Module, old: torch.nn.Module, names: dict[str, str]) -> None:
    """Make parameters of ``old`` those of ``new``, the very objects, so that ties and optimizers stay.

    Args:
        new: made on the meta device.
        old: where they are now.
        names: of parameters: in ``new``, dots for children, to in ``old``.
    """
    for inside, outside in names.items():
        *path, last = inside.split(".")
        owner = new.get_submodule(".".join(path))
        owner.register_parameter(last, old.get_parameter(outside))
    new.train(old.training)
