"""Rows of experts back to tokens: moe_unpermute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_tensor, renamed
from te_hal.modules.moe.checks import check_integers, check_probs, check_rows
from te_hal.modules.moe.permute import check_map_type
from te_hal.modules.moe.row_functions import NOBODY, SumRows
from te_hal.modules.moe.row_map import padded, slots_of_mask_map
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WHERE = "moe_unpermute"


@run_eagerly
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the rows of each token, each times its probability where there are some; a token without rows gets zeros.

    Sums and products run in fp32 and are rounded once.

    Args:
        inp: ``[rows, hidden]``, plain.
        row_id_map: what moe_permute returned.
        merging_probs: ``[tokens, experts]`` with a map of a mask, ``[tokens, topk]`` with one of indices; float32 is
            best.
        restore_shape: ``(tokens, hidden)``; None: as the map says, where it is one of a mask. For indices without
            probabilities it tells how many choices a token has; without either it has one.
        map_type: "mask" or "index", as moe_permute was called.
        probs: the older name of ``merging_probs``.
        pad_offsets: what moe_permute_and_pad_with_probs returned.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``inp``.

    Raises:
        ArgumentTypeError: no tensors, or a quantized one.
        ArgumentError: a map, shape or probabilities that do not fit; both names of the probabilities.
    """
    check_rows(_WHERE, inp, quantized=False)
    merging_probs = renamed(_WHERE, "merging_probs", merging_probs, "probs", probs)
    if merging_probs is not None:
        check_tensor(f"{_WHERE}: merging_probs", merging_probs)
    by_mask = check_map_type(_WHERE, map_type) == "mask"
    if isinstance(row_id_map, torch.Tensor) and row_id_map.dim() != (2 if by_mask else 1):
        raise _wrong_map(row_id_map, "[tokens, 2 experts + 1] of a mask" if by_mask else "[tokens * top-k] of indices")
    if by_mask:
        check_integers(f"{_WHERE}: row_id_map", row_id_map, (None, None), inp.device)
        if row_id_map.shape[1] % 2 == 0:
            raise _wrong_map(row_id_map, "[tokens, 2 experts + 1] of a mask")
        _check_shape(restore_shape, (len(row_id_map), inp.shape[1]))
        slots, weights = _of_mask(row_id_map, merging_probs, pad_offsets, inp.device)
    else:
        if pad_offsets is not None:
            raise ArgumentError(
                f"{_WHERE}: pad_offsets",
                got='map_type="index"',
                accepted='map_type="mask"',
                todo="permute by a mask",
            )
        check_integers(f"{_WHERE}: row_id_map", row_id_map, (None,), inp.device)
        tokens = _tokens_of(row_id_map, merging_probs, restore_shape)
        _check_shape(restore_shape, (tokens, inp.shape[1]))
        slots, weights = _of_indices(row_id_map, merging_probs, tokens, inp.device)
    if slots.numel() and int(slots.max()) >= len(inp):
        raise _wrong_map(row_id_map, f"rows below {len(inp)}, as inp has them", f"row {int(slots.max())}")
    weights = None if weights is None else weights.to(torch.float32)
    output: torch.Tensor = SumRows.apply(inp, weights, slots, _WHERE)  # type: ignore[no-untyped-call]
    return output


def _of_mask(
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    experts = (row_id_map.shape[1] - 1) // 2
    counts = row_id_map[:, -1]
    if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= experts:
        got = f"a token with {int(counts.min())} and one with {int(counts.max())} rows"
        raise _wrong_map(row_id_map, f"from 0 to {experts}, the experts, in the last column", got)
    slots, of_rows = slots_of_mask_map(row_id_map)
    if of_rows.numel() and int(of_rows.max()) >= experts:
        raise _wrong_map(row_id_map, f"experts below {experts}", f"expert {int(of_rows.max())}")
    if pad_offsets is not None:
        check_integers(f"{_WHERE}: pad_offsets", pad_offsets, (experts,), device)
        slots = padded(slots, row_id_map, pad_offsets)
    if merging_probs is None:
        return slots, None
    check_probs(f"{_WHERE}: merging_probs", merging_probs, (len(row_id_map), experts), device)
    return slots, merging_probs.gather(1, of_rows.clamp_min(0))


def _of_indices(
    row_id_map: torch.Tensor, merging_probs: torch.Tensor | None, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    choices = len(row_id_map) // tokens if tokens else 0
    if not tokens and merging_probs is not None:
        choices = merging_probs.shape[-1]
    slots = row_id_map.view(choices, tokens).t().to(torch.int64).clamp_min(NOBODY)
    if merging_probs is not None:
        check_probs(f"{_WHERE}: merging_probs", merging_probs, tuple(slots.shape), device)
    return slots, merging_probs


def _tokens_of(
    row_id_map: torch.Tensor, merging_probs: torch.Tensor | None, restore_shape: Sequence[int] | None
) -> int:
    tokens = len(row_id_map)
    if merging_probs is not None:
        tokens = len(merging_probs) if merging_probs.dim() else 1
    elif restore_shape is not None:
        tokens = _checked_pair(restore_shape)[0]
    if tokens < 0 or (len(row_id_map) % tokens if tokens else len(row_id_map)):
        raise _wrong_map(row_id_map, f"a multiple of the {tokens} tokens that probabilities or restore_shape name")
    return tokens


def _check_shape(restore_shape: Sequence[int] | None, shape: tuple[int, int]) -> None:
    if restore_shape is not None and _checked_pair(restore_shape) != shape:
        raise ArgumentError(
            f"{_WHERE}: restore_shape",
            got=str(tuple(restore_shape)),
            accepted=f"{shape}, as map and rows say",
            todo="correct it, or leave it out",
        )


def _checked_pair(restore_shape: object) -> tuple[int, int]:
    pair = tuple(restore_shape) if isinstance(restore_shape, (list, tuple)) else ()
    if len(pair) != 2 or not all(type(size) is int for size in pair):  # noqa: PLR2004 - said in the message
        raise ArgumentError(
            f"{_WHERE}: restore_shape", got=repr(restore_shape), accepted="(tokens, hidden)", todo="pass two ints"
        )
    return pair


def _wrong_map(row_id_map: torch.Tensor, accepted: str, got: str | None = None) -> ArgumentError:
    return ArgumentError(
        f"{_WHERE}: row_id_map",
        got=f"shape {tuple(row_id_map.shape)}" if got is None else got,
        accepted=accepted,
        todo="pass what moe_permute returned with these rows, and the same map_type",
    )
