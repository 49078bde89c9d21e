"""The arguments that say where sequences begin and end: cu_seqlens, max_seqlen and their like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.attention.masks import RULES
from te_hal.modules.attention.packing import Sequences, check_row_length, packed_sequences, padded_sequences
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    import torch

_ALL = frozenset(
    (
        *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
        *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs"),
    )
)
_OF_KEYS = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_kv")
_PADDED = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def thd_sequences(
    where: str, name: str, given: dict[str, Any], query: torch.Tensor, key: torch.Tensor, *, same: bool
) -> tuple[Sequences, Sequences]:
    """Sequences of packed queries and keys.

    Args:
        where: the module, for messages.
        name: mask type, of masks.RULES.
        given: the call's arguments by name.
        query: ``[t, h, d]``.
        key: ``[t, g, d]``.
        same: keys have the queries' sequences where nothing is said about theirs.

    Raises:
        ArgumentError: missing or wrong numbers; an attention_mask; a mask type of its own.
    """
    if RULES[name].tensor == "arbitrary" or given.get("attention_mask") is not None:
        raise ArgumentError(
            f"{where}: attention_mask" if RULES[name].tensor != "arbitrary" else f"{where}: attn_mask_type",
            got=f'attn_mask_type={name!r}, a mask or none, for packed sequences (qkv_format="thd")',
            accepted='None with "padding", "padding_causal" or "padding_causal_bottom_right" ("no_mask", "causal" and '
            '"causal_bottom_right" mean the same here)',
            todo='leave the mask out, or pass padded sequences as "bshd"',
        )
    between = given.get("pad_between_seqs")
    if between is not None:
        check_flags(where, {"pad_between_seqs": between})
        if between is False and any(given.get(padded) is not None for padded in _PADDED):
            raise ArgumentError(
                f"{where}: pad_between_seqs",
                got="False with cu_seqlens_q_padded or cu_seqlens_kv_padded",
                accepted="True, or None to have it follow from these",
                todo="leave it out",
            )
    queries = _packed(where, "q", given, query)
    if same and all(given.get(argument) is None for argument in _OF_KEYS) and key.shape[0] == query.shape[0]:
        return queries, queries
    keys = _packed(where, "kv", given, key)
    counts = len(queries.lengths), len(keys.lengths)
    if counts[0] != counts[1]:
        raise ArgumentError(
            f"{where}: cu_seqlens_kv",
            got=f"{counts[1]} sequences of keys for {counts[0]} of queries",
            accepted="as many of both, one of which may have no tokens",
            todo="correct cu_seqlens_q or cu_seqlens_kv",
        )
    return queries, keys


def _packed(where: str, name: str, given: dict[str, Any], tokens: torch.Tensor) -> Sequences:
    arguments = (f"cu_seqlens_{name}", f"cu_seqlens_{name}_padded", f"max_seqlen_{name}")
    cumulative, padded, longest = (given.get(argument) for argument in arguments)
    return packed_sequences(where, name, cumulative, padded, longest, tokens)


def dense_sequences(
    where: str, given: dict[str, Any], query: torch.Tensor, key: torch.Tensor, *, same: bool
) -> tuple[Sequences, Sequences]:
    """Sequences at the front of padded rows, in the place of a padding mask.

    Args:
        where: the module, for messages.
        given: the call's arguments by name.
        query: ``[b, h, sq, d]``.
        key: ``[b, g, sk, d]``.
        same: keys have the queries' sequences where nothing is said about theirs, and rows are as long.

    Raises:
        ArgumentError: missing or wrong numbers, or such as belong to packed sequences.
    """
    _refuse_offsets(where, given)
    batch, device = query.shape[0], query.device
    both: list[Sequences] = []
    for name, length in (("q", query.shape[2]), ("kv", key.shape[2])):
        cumulative, longest = given.get(f"cu_seqlens_{name}"), given.get(f"max_seqlen_{name}")
        if name == "kv" and same and cumulative is None and longest is None and key.shape[2] == query.shape[2]:
            both.append(both[0])
        else:
            both.append(padded_sequences(where, name, cumulative, longest, batch, length, device))
    return both[0], both[1]


def check_no_sequences(where: str, name: str, given: dict[str, Any], queries: int, keys: int) -> None:
    """Refuse numbers that nothing would read.

    Args:
        where: the module, for messages.
        name: mask type.
        given: the call's arguments by name, those that are None left out.
        queries: how many.
        keys: how many.

    Raises:
        ArgumentError: there are some.
    """
    if _ALL.isdisjoint(given):
        return
    _refuse_offsets(where, given)
    for argument in ("cu_seqlens_q", "cu_seqlens_kv"):
        if given.get(argument) is not None:
            raise ArgumentError(
                f"{where}: {argument}",
                got=f"lengths under attn_mask_type={name!r}, qkv_format={given.get('qkv_format')!r}"
                + (" beside an attention_mask" if given.get("attention_mask") is not None else ""),
                accepted="None: nothing would read them",
                todo='choose "padding" or "padding_causal" without an attention_mask, or qkv_format="thd"',
            )
    for argument, length in (("q", queries), ("kv", keys)):
        check_row_length(where, argument, given.get(f"max_seqlen_{argument}"), length)


def _refuse_offsets(where: str, given: dict[str, Any]) -> None:
    for argument in (*_PADDED, "pad_between_seqs"):
        value = given.get(argument)
        if value is not None and value is not False:
            raise ArgumentError(
                f"{where}: {argument}",
                got="a value for rows of one length",
                accepted="None: it says where packed sequences lie",
                todo='leave it out, or pass packed sequences with qkv_format="thd"',
            )
