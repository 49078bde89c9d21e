"""What MultiheadAttention is made with and called with, checked."""

from __future__ import annotations

from typing import Any, Protocol

from te_hal.modules.arguments import check_size, check_tensor
from te_hal.modules.attention.layout import leading_sizes
from te_hal.modules.attention.projection import HeadLayout
from te_hal.modules.attention.sizes import check_groups
from te_hal.modules.norm_parameters import norm_op
from te_hal.schema.errors import ArgumentError

#: Arguments that are bools.
FLAGS = (
    "fuse_wgrad_accumulation",
    "return_bias",
    "return_layernorm_output",
    "input_layernorm",
    "fuse_qkv_params",
    "zero_centered_gamma",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "qk_norm_before_rope",
    "bias",
)


def check_together(kind: str, given: dict[str, Any]) -> None:
    """Refuse arguments that would be ignored, or that cannot go together.

    Raises:
        ArgumentError: one of them, naming what it needs; an unknown normalization.
    """
    for name, needed, why in (
        ("fuse_wgrad_accumulation", "fuse_qkv_params", "a gradient is written into one main_grad"),
        ("return_layernorm_output", "input_layernorm", "there is no norm otherwise"),
    ):
        if given[name] and not given[needed]:
            raise ArgumentError(
                f"{kind}: {name}", got=f"True with {needed}=False", accepted=f"{needed}=True: {why}", todo="set both"
            )
    norm_op(kind, given["normalization"])


def head_layout(
    kind: str, hidden_size: int, heads: object, groups: object, channels: object, interleaved: bool
) -> HeadLayout:
    """Heads and channels that fit together.

    Raises:
        ArgumentError: counts that do not divide, or are no positive ints.
    """
    count = check_size(f"{kind}: num_attention_heads", heads)
    if channels is None and hidden_size % count:
        raise ArgumentError(
            f"{kind}: num_attention_heads",
            got=f"{count} heads for hidden_size={hidden_size}",
            accepted="a divisor of hidden_size, or any number with kv_channels",
            todo="correct one of the two, or pass kv_channels",
        )
    chosen = hidden_size // count if channels is None else check_size(f"{kind}: kv_channels", channels)
    return HeadLayout(count, check_groups(kind, count, groups), chosen, interleaved)


class Inputs(Protocol):
    """What decides which inputs a module takes."""

    hidden_size: int
    qkv_format: str
    attention_type: str

    @property
    def label(self) -> str:
        """For messages."""
        ...


def check_inputs(module: Inputs, hidden_states: object, encoder_output: object, angles: object) -> None:
    """What a call must be given.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another shape; an ``encoder_output`` that is missing or too much; neither one tensor of angles
            nor a pair.
    """
    if isinstance(angles, (tuple, list)) and len(angles) != 2:  # noqa: PLR2004 - said in the message
        raise ArgumentError(
            f"{module.label}: rotary_pos_emb",
            got=f"{len(angles)} of them",
            accepted="angles for both, or a pair: of queries, of keys",
            todo="correct it",
        )
    tensors = {"hidden_states": hidden_states}
    if (encoder_output is None) == (module.attention_type == "cross"):
        raise ArgumentError(
            f"{module.label}: encoder_output",
            got="None" if encoder_output is None else "a tensor",
            accepted='a tensor where attention_type is "cross", None where it is "self"',
            todo=f"this module's is {module.attention_type!r}",
        )
    if encoder_output is not None:
        tensors["encoder_output"] = encoder_output
    for name, value in tensors.items():
        tensor = check_tensor(f"{module.label}: {name}", value)
        if tensor.dim() != len(module.qkv_format) - 1 or tensor.shape[-1] != module.hidden_size:
            raise ArgumentError(
                f"{module.label}: {name}",
                got=f"shape {tuple(tensor.shape)}",
                accepted=f"[{leading_sizes(module.qkv_format)}, {module.hidden_size}], by qkv_format and hidden_size",
                todo="check which layer feeds this one",
            )
