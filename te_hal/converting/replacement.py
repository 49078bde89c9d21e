"""Reasons that hold for every kind of module, and how parameters come into the new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.schema.errors import ArgumentError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from te_hal.quantization.operand_formats import Formats

#: torch answers nowhere in public whether a module has hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

_OF_ATTENTION = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
)
_OF_LAYER = ("self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2", "activation")

#: What torch's layers consist of, and the names of parameters, buffers and parts in each.
_OWN: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset(("weight", "bias")),
    NonDynamicallyQuantizableLinear: frozenset(("weight", "bias")),
    nn.LayerNorm: frozenset(("weight", "bias")),
    nn.RMSNorm: frozenset(("weight",)),
    nn.Dropout: frozenset(),
    nn.ReLU: frozenset(),
    nn.MultiheadAttention: frozenset((*_OF_ATTENTION, "out_proj")),
    nn.TransformerEncoderLayer: frozenset(_OF_LAYER),
}


def reason_to_stay(module: nn.Module) -> str | None:
    """Why a module of a known class cannot be replaced at all; None where nothing speaks against it.

    Its parts count, too: a counterpart computes without a call of them.
    """
    for path, part in module.named_modules():
        reason = _reason_of(part)
        if reason is not None:
            return f"of its {path}: {reason}" if path else reason
    parameters = dict(module.named_parameters())
    odd = [name for name, parameter in parameters.items() if type(parameter) is not nn.Parameter]
    if odd:
        return f"{odd[0]} is a {type(parameters[odd[0]]).__name__}"
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        return "its parameters have several dtypes"
    if dtypes and not dtypes & set(FLOATS):
        return f"its parameters are {next(iter(dtypes))}; te_hal's modules have fp32, fp16 or bf16"
    return None


def _reason_of(part: nn.Module) -> str | None:
    """What a user has made of one of torch's modules."""
    if type(part) not in _OWN:
        return f"{type(part).__name__} may compute something else"
    if any(getattr(part, hooks) for hooks in _HOOKS):
        return "it has hooks, which a new module would lose"
    if "forward" in vars(part):
        return "its forward was replaced"
    named = (part.named_parameters(recurse=False), part.named_buffers(recurse=False), part.named_children())
    added = {name for each in named for name, _ in each} - _OWN[type(part)]
    return f"{min(added)} was added to it, which a new module would lose" if added else None


def reason_against_fp8(shape: tuple[int, ...], formats: Formats) -> str | None:
    """Why a weight of ``[out_features, in_features]`` cannot be multiplied under the recipe; None where it can."""
    try:
        check_fp8_shape("Linear", "weight", shape, formats, ("out_features", "in_features"))
    except ArgumentError as error:
        return f"{error.accepted}: the recipe's products do not take its {tuple(shape)} weight"
    return None


def hand_over(new: nn.Module, old: nn.Module, names: dict[str, str]) -> None:
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
