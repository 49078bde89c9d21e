"""``m_splits``: how many rows of an input belong to each product of a group."""

from __future__ import annotations

import torch

from te_hal.schema.errors import ArgumentError, ArgumentTypeError


def checked_splits(where: str, m_splits: object, count: int, rows: int) -> tuple[int, ...]:
    """The sizes of the splits as ints.

    Args:
        where: module class and name, for the message.
        m_splits: a sequence of ints, or a tensor of integers ``[count]`` on any device, which is waited for.
        count: how many products there are.
        rows: of the input; those beyond the last split belong to no product.

    Raises:
        ArgumentTypeError: neither of these.
        ArgumentError: another number of them, a negative one, more rows than the input has.
    """
    sizes = _as_ints(where, m_splits)
    if len(sizes) != count:
        raise _wrong(where, f"{len(sizes)} sizes", f"{count}, one for each product", "give an expert without rows a 0")
    negative = [number for number, size in enumerate(sizes) if size < 0]
    if negative:
        raise _wrong(where, f"{sizes[negative[0]]} at {negative[0]}", "sizes of at least 0", "count the rows again")
    if sum(sizes) > rows:
        got = f"{sum(sizes)} rows in all, for an input of {rows}"
        raise _wrong(where, got, f"at most {rows}", "pass the sizes that go with this input")
    return sizes


def _as_ints(where: str, m_splits: object) -> tuple[int, ...]:
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dim() != 1 or m_splits.is_floating_point() or m_splits.dtype == torch.bool:
            got = f"a tensor of {m_splits.dtype}, shape {tuple(m_splits.shape)}"
            raise _wrong(where, got, "integers, one for each product", "pass [num_gemms] integers")
        return tuple(m_splits.tolist())
    if isinstance(m_splits, (list, tuple)) and all(type(size) is int for size in m_splits):
        return tuple(m_splits)
    raise ArgumentTypeError(
        f"{where}: m_splits",
        got=repr(m_splits) if isinstance(m_splits, (list, tuple)) else f"a {type(m_splits).__name__}",
        accepted="a list of ints, or a tensor of integers",
        todo="pass the number of rows of each product",
    )


def _wrong(where: str, got: str, accepted: str, todo: str) -> ArgumentError:
    return ArgumentError(f"{where}: m_splits", got=got, accepted=accepted, todo=todo)
