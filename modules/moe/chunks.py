"""Chunks of rows in another order, as after an exchange between processes that hold experts."""

from __future__ import annotations

import torch

from te_hal.modules.moe.checks import check_integers, check_probs, check_rows
from te_hal.modules.moe.row_functions import GatherRows
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError


@run_eagerly
def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """The consecutive chunks of a tensor, in another order.

    Args:
        inp: ``[rows, hidden]``, plain or quantized as in moe_permute.
        split_sizes: integers ``[n]``: rows of each chunk; together all rows.
        sorted_index: integers ``[n]``: the chunk that comes first, second, ...; each chunk once.

    Returns:
        ``[rows, hidden]``.

    Raises:
        ArgumentTypeError: no tensors.
        ArgumentError: sizes or an order that do not fit.
        UnsupportedError: quantized data whose rows share scales.
    """
    return _sorted("moe_sort_chunks_by_index", inp, split_sizes, sorted_index)[0]


@run_eagerly
def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_sort_chunks_by_index`, and the rows' probabilities in the same order.

    Args:
        inp: as there.
        probs: ``[rows]``.
        split_sizes: as there.
        sorted_index: as there.

    Returns:
        ``[rows, hidden]`` and ``[rows]``.

    Raises:
        ArgumentTypeError, ArgumentError, UnsupportedError: as there; probabilities of another shape.
    """
    where = "moe_sort_chunks_by_index_with_probs"
    check_rows(where, inp)
    check_probs(f"{where}: probs", probs, (len(inp),), inp.device)
    output, source = _sorted(where, inp, split_sizes, sorted_index)
    return output, probs.index_select(0, source)


def _sorted(
    where: str, inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in their new order, and where each was."""
    check_rows(where, inp)
    sizes = check_integers(f"{where}: split_sizes", split_sizes, (None,), inp.device).to(torch.int64)
    order = check_integers(f"{where}: sorted_index", sorted_index, (len(sizes),), inp.device).to(torch.int64)
    if bool((sizes < 0).any()) or int(sizes.sum()) != len(inp):
        raise ArgumentError(
            f"{where}: split_sizes",
            got=str(sizes.tolist()),
            accepted=f"sizes of at least 0 that add up to the {len(inp)} rows of inp",
            todo="pass the sizes that go with this input",
        )
    if not torch.equal(order.sort().values, torch.arange(len(sizes), device=order.device)):
        raise ArgumentError(
            f"{where}: sorted_index",
            got=str(order.tolist()),
            accepted=f"each number from 0 to {len(sizes) - 1} once",
            todo="pass an order of the chunks",
        )
    starts = sizes.cumsum(0) - sizes
    moved = sizes[order]
    ends = moved.cumsum(0)
    shift = (starts[order] - (ends - moved)).repeat_interleave(moved)
    source = torch.arange(len(inp), device=inp.device) + shift
    slots = source.argsort()[:, None]
    output: torch.Tensor = GatherRows.apply(inp, source, slots, where)  # type: ignore[no-untyped-call]
    return output, source
