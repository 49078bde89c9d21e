"""AttentionCall: one call of DotProductAttention, checked, in the form that the implementations take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from te_hal.modules.activation_dtype import activation_dtype, plain_input
from te_hal.modules.attention import masks
from te_hal.modules.attention.bias import ALIBI, NO_BIAS, Bias, check_bias
from te_hal.modules.attention.choice import AttentionKey
from te_hal.modules.attention.layout import PACKED, check_format, heads_first
from te_hal.modules.attention.masks import RULES, WITH_PADDING, mask_type
from te_hal.modules.attention.packed_operands import unpacked
from te_hal.modules.attention.packing import Sequences, padding_of
from te_hal.modules.attention.redundant_mask import check_redundant
from te_hal.modules.attention.sequence_arguments import check_no_sequences, dense_sequences, thd_sequences
from te_hal.modules.attention.sizes import Sizes, check_sizes
from te_hal.modules.attention.softmax_type import VANILLA
from te_hal.modules.attention.visibility import EVERYTHING, Visibility, check_window, is_bottom_right

if TYPE_CHECKING:
    from te_hal.modules.attention.masks import Padding


class Attention(Sizes, Protocol):
    """What a module decides for its calls."""

    qkv_format: str
    attn_mask_type: str
    attention_type: str
    layer_number: int | None
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    softmax_type: str
    return_max_logit: bool
    always_written_out: bool


class AttentionCall(NamedTuple):
    """A call.

    Attributes:
        query: ``[b, h, sq, d]``, packed ``[t, h, d]``, in the activation dtype.
        key: ``[b, g, sk, d]`` or ``[t, g, d]``.
        value: the same with the channels of values.
        sizes: ``(b, h, sq, sk)``; of packed sequences their number and the longest.
        visibility: which keys are seen, of packed sequences those within each.
        bias: what is added to the scores.
        sequences: of packed queries and keys, None where they are not packed.
        qkv_format: of the output.
        key_of_plan: what the choice of an implementation depends on.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sizes: tuple[int, int, int, int]
    visibility: Visibility
    bias: Bias
    sequences: tuple[Sequences, Sequences] | None
    qkv_format: str
    key_of_plan: AttentionKey


class Operands(NamedTuple):
    """Queries, keys and values of a call, and what their tokens belong to.

    Attributes:
        tensors: in the activation dtype, ``[b, h, s, d]`` or packed ``[t, h, d]``.
        sequences: those that are packed, or lie at the front of rows of one length; None: every row is whole.
        name: mask type, of masks.RULES.
        qkv_format: of the call.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sequences: tuple[Sequences, Sequences] | None
    name: str
    qkv_format: str


def operands(module: Attention, label: str, given: dict[str, Any]) -> Operands:
    """Check tensors, format, mask type and sequences of a call.

    Args:
        module: settings for arguments that are None.
        label: the module, for messages.
        given: the arguments of DotProductAttention.forward by name.

    Raises:
        ArgumentTypeError: queries, keys or values are no tensors.
        ArgumentError: shapes, dtypes, devices or sequences that do not fit.
    """
    chosen, name = format_and_mask_type(module, label, given)
    query, key, value = activations(module, label, given, chosen)
    if chosen == PACKED:
        name = WITH_PADDING.get(name, name)
        sequences = thd_sequences(label, name, given, query, key, same=module.attention_type == "self")
        return Operands((query, key, value), sequences, name, chosen)
    query, key, value = (heads_first(tensor, chosen) for tensor in (query, key, value))
    if (
        RULES[name].tensor == "padding"
        and given.get("attention_mask") is None
        and given.get("cu_seqlens_q") is not None
    ):
        sequences = dense_sequences(label, given, query, key, same=module.attention_type == "self")
        return Operands((query, key, value), sequences, name, chosen)
    check_no_sequences(label, name, given, query.shape[2], key.shape[2])
    return Operands((query, key, value), None, name, chosen)


def format_and_mask_type(module: Attention, label: str, given: dict[str, Any]) -> tuple[str, str]:
    """Those of a call, else the module's.

    Raises:
        ArgumentError: unknown ones.
    """
    asked, kind = given.get("qkv_format"), given.get("attn_mask_type")
    return (
        module.qkv_format if asked is None else check_format(f"{label}: qkv_format", asked),
        module.attn_mask_type if kind is None else mask_type(f"{label}: attn_mask_type", kind),
    )


def activations(
    module: Attention, label: str, given: dict[str, Any], qkv_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a call, plain and in the activation dtype, in ``qkv_format``.

    Raises:
        ArgumentTypeError: they are no tensors.
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    query, key, value = check_sizes(label, unpacked(label, given, qkv_format), qkv_format, module)
    dtype = activation_dtype(label, query, key=key, value=value)
    return plain_input(query, dtype), plain_input(key, dtype), plain_input(value, dtype)


def attention_call(module: Attention, label: str, given: dict[str, Any], found: Operands) -> AttentionCall:
    """Masks, window and bias of a call around its operands.

    Raises:
        ArgumentError: masks, windows or biases that do not fit.
    """
    query, key, value = found.tensors
    packed = found.qkv_format == PACKED
    batch, queries, keys = query.shape[0], query.shape[-2], key.shape[-2]
    if found.sequences is not None:
        batch, queries, keys = found.sequences[0].lengths.shape[0], *(each.longest for each in found.sequences)
    sizes = (batch, module.num_attention_heads, queries, keys)
    bias = check_bias(
        label,
        given.get("core_attention_bias_type", NO_BIAS),
        given.get("core_attention_bias"),
        given.get("alibi_slopes"),
        sizes,
        query.device,
    )
    visibility = _visibility(module, label, given, found, sizes, bias)
    window, masked = visibility.window, visibility.hidden is not None
    diagonal = visibility.diagonal(queries, keys)
    apart = module.softmax_type != VANILLA or module.return_max_logit
    in_tensor = diagonal is None or (apart and window != EVERYTHING)
    plan = AttentionKey(
        query.dtype,
        query.device,
        causal="none" if in_tensor or diagonal is None else diagonal[0],
        windowed=not (window == EVERYTHING or (window == (-1, 0) and _is_zero(visibility.offset))),
        masked=masked,
        mask_tensor=packed or masked or in_tensor,
        window_in_tensor=in_tensor,
        sees_something=not packed and visibility.sees_something(queries, keys),
        empty=0 in sizes or not (query.numel() and key.numel()),
        packed=packed,
        bias=bias.type,
        softmax_type=module.softmax_type,
        tells_largest=module.return_max_logit,
        always_written_out=module.always_written_out,
    )
    sequences = found.sequences if packed else None
    return AttentionCall(query, key, value, sizes, visibility, bias, sequences, found.qkv_format, plan)


def _visibility(
    module: Attention,
    label: str,
    given: dict[str, Any],
    found: Operands,
    sizes: tuple[int, int, int, int],
    bias: Bias,
) -> Visibility:
    name, device = found.name, found.tensors[0].device
    asked = given.get("window_size")
    window = check_window(label, module.window_size if asked is None else asked, name)
    bottom_right = is_bottom_right(label, given.get("bottom_right_diagonal"), name, module.bottom_right_diagonal)
    mask, padding, hidden = given.get("attention_mask"), None, None
    if found.sequences is not None:
        padding = padding_of(*found.sequences)
    elif RULES[name].tensor == "padding":
        padding = masks.padding(label, mask, sizes, device)
    elif RULES[name].tensor == "arbitrary":
        hidden = masks.arbitrary(label, mask, sizes, device)
    offset: int | torch.Tensor = 0
    if bottom_right and (window != EVERYTHING or bias.type == ALIBI):
        offset = sizes[3] - sizes[2] if padding is None else _own_offsets(padding, found.sequences)
    seen = _without_idle_borders(window, offset, *sizes[2:])
    if padding is not None and found.qkv_format != PACKED:
        hidden = padding.hidden()
    visibility = Visibility(hidden, seen, offset)
    if padding is None and not RULES[name].tensor:
        check_redundant(label, name, mask, visibility, sizes, device)
    return visibility


def _without_idle_borders(
    window: tuple[int, int], offset: int | torch.Tensor, queries: int, keys: int
) -> tuple[int, int]:
    """The window, -1 for a border that hides no key of any query."""
    if isinstance(offset, torch.Tensor):
        return window
    left, right = window
    return -1 if left >= offset + queries - 1 else left, -1 if right >= keys - 1 - offset else right


def _own_offsets(padding: Padding, sequences: tuple[Sequences, Sequences] | None) -> int | torch.Tensor:
    """Each sequence's own; 0 where queries and keys are known to be as many."""
    if padding.queries is padding.keys or (sequences is not None and sequences[0] is sequences[1]):
        return 0
    if sequences is None:
        return padding.offsets()
    offsets = sequences[1].lengths - sequences[0].lengths
    return offsets if offsets.device.type != "cpu" or bool(offsets.any()) else 0


def _is_zero(offset: int | torch.Tensor) -> bool:
    return not isinstance(offset, torch.Tensor) and offset == 0
