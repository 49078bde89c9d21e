"""Tokens to the rows of their experts: moe_permute and its forms with probabilities and padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_size
from te_hal.modules.moe.checks import (
    check_integers,
    check_probs,
    check_rows,
    checked_count,
    checked_indices,
    checked_mask,
)
from te_hal.modules.moe.row_functions import GatherRows
from te_hal.modules.moe.row_map import permutation_of_indices, permutation_of_mask
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from te_hal.modules.moe.row_map import Permutation

#: How a routing map says where tokens go.
MAP_TYPES = ("mask", "index")


@run_eagerly
def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each token to a row for each of its experts; rows are grouped by expert, then in the order of tokens.

    Args:
        inp: ``[tokens, hidden]``, plain or quantized (Float8Tensor, 1x128 blocks, MXFP8, MTFP8; the result is quantized
            alike, rowwise, and gradients are plain).
        routing_map: with "mask" ``[tokens, experts]``, 1 or True where a token goes to an expert; with "index"
            ``[tokens, topk]``, numbers of experts, -1 for a choice that is dropped.
        num_out_tokens: rows of the result; -1: as many as are routed. With fewer, the last ones in the order of rows
            are dropped, as if they were not routed; more are zeros.
        max_token_num: refused by name: no memory is set aside.
        map_type: "mask" or "index".

    Returns:
        ``[num_out_tokens, hidden]``, and the map back, for moe_unpermute (te_hal.modules.moe.row_map).

    Raises:
        ArgumentTypeError: no tensors.
        ArgumentError: a map that does not fit; a number of rows that is neither -1 nor positive.
        UnsupportedError: ``max_token_num``; quantized data whose rows share scales.
    """
    where = "moe_permute"
    refuse(where, {"max_token_num": max_token_num}, _REFUSED)
    check_rows(where, inp)
    if check_map_type(where, map_type) == "mask":
        mask = checked_mask(where, routing_map, len(inp), inp.device)
        rows = checked_count(where, num_out_tokens, int(mask.sum()))
        made = permutation_of_mask(mask, rows, None)
    else:
        indices = checked_indices(where, routing_map, len(inp), inp.device)
        rows = checked_count(where, num_out_tokens, int((indices >= 0).sum()))
        made = permutation_of_indices(indices, rows)
    return _permuted(inp, made, where), made.row_id_map


@run_eagerly
def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`moe_permute` by a mask, and the probability of each row.

    Args:
        inp: as there.
        probs: ``[tokens, experts]``.
        routing_map: as there with "mask".
        num_out_tokens: as there.

    Returns:
        The rows; their probabilities ``[num_out_tokens]``, 0 for rows beyond those that are routed; the map back.

    Raises:
        ArgumentTypeError, ArgumentError, UnsupportedError: as there; probabilities of another shape.
    """
    where = "moe_permute_with_probs"
    check_rows(where, inp)
    mask = checked_mask(where, routing_map, len(inp), inp.device)
    check_probs(f"{where}: probs", probs, tuple(mask.shape), inp.device)
    rows = checked_count(where, num_out_tokens, int(mask.sum()))
    made = permutation_of_mask(mask, rows, None)
    return _permuted(inp, made, where), _permuted_probs(probs, made), made.row_id_map


@run_eagerly
def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """:func:`moe_permute_with_probs`, the rows of each expert padded with zeros to a multiple.

    Args:
        inp: as there.
        probs: as there.
        routing_map: as there.
        tokens_per_expert: integers ``[experts]`` on any device: how many rows the mask gives each.
        align_size: the multiple.

    Returns:
        The rows; their probabilities, 0 for padding; the map back, without the padding; ``pad_offsets`` ``[experts]``,
        which moe_unpermute adds to it, or None where nothing was padded; the padded rows of each expert, int64
        ``[experts]``.

    Raises:
        ArgumentTypeError, ArgumentError, UnsupportedError: as there; numbers of tokens that are not the mask's.
    """
    where = "moe_permute_and_pad_with_probs"
    check_rows(where, inp)
    mask = checked_mask(where, routing_map, len(inp), inp.device)
    check_probs(f"{where}: probs", probs, tuple(mask.shape), inp.device)
    check_size(f"{where}: align_size", align_size)
    counts = _checked_counts(f"{where}: tokens_per_expert", tokens_per_expert, mask)
    padded = -(-counts // align_size) * align_size
    lengths = padded - counts
    pad_offsets = lengths.cumsum(0) - lengths if bool(lengths.any()) else None
    made = permutation_of_mask(mask, int(padded.sum()), pad_offsets)
    return _permuted(inp, made, where), _permuted_probs(probs, made), made.row_id_map, pad_offsets, padded


_REFUSED = declare(
    "moe_permute",
    {"max_token_num": -1},
    {"max_token_num": "it sizes a workspace that is kept between calls; each call here takes the memory it needs"},
)


def check_map_type(where: str, map_type: object) -> str:
    """One of MAP_TYPES.

    Raises:
        ArgumentError: another one.
    """
    if map_type not in MAP_TYPES:
        raise ArgumentError(
            f"{where}: map_type", got=repr(map_type), accepted=" or ".join(map(repr, MAP_TYPES)), todo="choose one"
        )
    return str(map_type)


def _checked_counts(where: str, tokens_per_expert: object, mask: torch.Tensor) -> torch.Tensor:
    device = tokens_per_expert.device if isinstance(tokens_per_expert, torch.Tensor) else mask.device
    given = check_integers(where, tokens_per_expert, (mask.shape[1],), device).to(mask.device, torch.int64)
    counts = mask.sum(dim=0)
    if not torch.equal(given, counts):
        raise ArgumentError(
            where,
            got=str(given.tolist()),
            accepted=f"{counts.tolist()}, as the routing map says",
            todo="pass routing_map.sum(dim=0)",
        )
    return counts


def _permuted(inp: torch.Tensor, made: Permutation, where: str) -> torch.Tensor:
    rows: torch.Tensor = GatherRows.apply(inp, made.source, made.slots, where)  # type: ignore[no-untyped-call]
    return rows


def _permuted_probs(probs: torch.Tensor, made: Permutation) -> torch.Tensor:
    if not probs.numel():
        return probs.new_zeros(len(made.choices)) + probs.sum()
    found = probs.reshape(-1).index_select(0, made.choices.clamp_min(0))
    return torch.where(made.choices < 0, 0, found)
