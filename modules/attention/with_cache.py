"""Attention of new queries over the keys and values of their whole sequences, which a cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.attention.call import (
    Attention,
    AttentionCall,
    Operands,
    activations,
    attention_call,
    format_and_mask_type,
)
from te_hal.modules.attention.layout import PACKED, heads_first
from te_hal.modules.attention.masks import RULES, WITH_PADDING
from te_hal.modules.attention.packing import Sequences
from te_hal.modules.inference.inference_params import InferenceParams
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from te_hal.modules.inference.step import Step

#: Arguments that a cache answers itself.
_ANSWERED = (
    *("attention_mask", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs", "bottom_right_diagonal"),
)


def attention_with_cache(module: Attention, label: str, given: dict[str, Any]) -> AttentionCall:
    """Write new keys and values to the cache, and describe the attention of the queries over all of them.

    Args:
        module: its ``layer_number`` says which cache.
        label: the module, for messages.
        given: the arguments of DotProductAttention.forward by name, ``inference_params`` among them.

    Raises:
        ArgumentTypeError: ``inference_params`` is none; queries, keys or values are no tensors.
        ArgumentError: no ``layer_number``; cross-attention; arguments that the cache answers; what does not fit it.
        StateError: as InferenceParams.claim and InferenceParams.step.
    """
    params, name, chosen = _settings(module, label, given)
    params.claim(module.layer_number, module, label)  # type: ignore[arg-type] # checked, and a torch.nn.Module
    query, key, value = activations(module, label, given, chosen)
    step = params.step_under_way
    keys, values = params.step(module.layer_number, key, value, chosen)  # type: ignore[arg-type] # checked
    found = (
        _packed(query, keys, values, name, step)
        if chosen == PACKED
        else _rows(heads_first(query, chosen), keys, values, name, chosen, step)
    )
    rest = {argument: value for argument, value in given.items() if argument not in _ANSWERED}
    return attention_call(module, label, {**rest, "bottom_right_diagonal": True}, found)


def _settings(module: Attention, label: str, given: dict[str, Any]) -> tuple[InferenceParams, str, str]:
    """The cache, the mask type with its diagonal at the sequences' ends, and the format."""
    params, where = given["inference_params"], f"{label}: inference_params"
    if not isinstance(params, InferenceParams):
        got = f"a {type(params).__name__}"
        raise ArgumentTypeError(where, got=got, accepted="a te.InferenceParams", todo="make one")
    if module.layer_number is None or module.attention_type != "self":
        raise ArgumentError(
            where,
            got=f"layer_number={module.layer_number}, attention_type={module.attention_type!r}",
            accepted='a layer_number, which says whose cache it is, and attention_type="self"',
            todo="make the module with them; cross-attention reads its keys anew from encoder_output",
        )
    for argument in _ANSWERED:
        if given.get(argument) is not None:
            raise ArgumentError(
                f"{label}: {argument}",
                got="a value beside inference_params",
                accepted="None: the cache knows every sequence's length, and a causal mask ends where it does",
                todo="leave it out",
            )
    chosen, name = format_and_mask_type(module, label, given)
    name = WITH_PADDING.get(name, name)
    if RULES[name].tensor != "padding":
        raise ArgumentError(
            f"{label}: attn_mask_type",
            got=f"{name!r} with inference_params",
            accepted='"padding" and "padding_causal" ("no_mask" and "causal" mean the same here)',
            todo="choose one of them for generation",
        )
    return params, "padding_causal_bottom_right" if RULES[name].causal != "none" else name, chosen


def _rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, name: str, chosen: str, step: Step
) -> Operands:
    """Queries ``[b, h, s, d]`` and cached rows; without padding where all sequences are as long."""
    tensors = (query, keys.transpose(1, 2), values.transpose(1, 2))
    length = query.shape[2]
    if set(step.new) <= {length} and len(set(step.after)) <= 1:
        whole = next(plain_name for plain_name, padded in WITH_PADDING.items() if padded == name)
        return Operands(tensors, None, whole, chosen)
    queries = _sequences(step, "new", length, query.device)
    return Operands(tensors, (queries, _sequences(step, "after", keys.shape[1], query.device)), name, chosen)


def _packed(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, name: str, step: Step) -> Operands:
    """Packed queries, and cached rows as packed sequences with gaps."""
    device = query.device
    new = step.lengths("new", device)
    queries = Sequences(new.cumsum(0) - new, new, max(step.new, default=0))
    rows = _sequences(step, "after", keys.shape[1], device)
    starts = torch.arange(keys.shape[0], device=device) * keys.shape[1]
    tensors = (query, keys.flatten(0, 1), values.flatten(0, 1))
    return Operands(tensors, (queries, rows._replace(starts=starts)), name, PACKED)


def _sequences(step: Step, which: str, longest: int, device: torch.device) -> Sequences:
    lengths = step.lengths(which, device)
    return Sequences(torch.zeros_like(lengths), lengths, longest)
