"""Routing of tokens to experts and back, token by token in float64: what the vectorised functions are held against."""

from __future__ import annotations

from typing import NamedTuple

import torch

DROPPED = -1


class Rows(NamedTuple):
    """The rows of the experts, in order: each row's token and expert (None for padding), and where experts begin."""

    tokens: list[int | None]
    experts: list[int | None]


def rows_of_mask(mask: torch.Tensor, align: int = 1) -> Rows:
    tokens: list[int | None] = []
    experts: list[int | None] = []
    for expert in range(mask.shape[1]):
        mine: list[int | None] = [token for token in range(mask.shape[0]) if mask[token, expert]]
        padding = -len(mine) % align
        tokens += [*mine, *[None] * padding]
        experts += [*[expert] * len(mine), *[None] * padding]
    return Rows(tokens, experts)


def rows_of_indices(indices: torch.Tensor) -> list[tuple[int, int]]:
    """Of each row its token and the number of that token's choice."""
    found = []
    for expert in range(int(indices.max()) + 1 if indices.numel() else 0):
        for token, chosen in enumerate(indices.tolist()):
            found += [(token, choice) for choice, number in enumerate(chosen) if number == expert]
    return found


def permuted(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    nothing = torch.zeros_like(x[0]) if len(x) else x.new_zeros(x.shape[1:])
    picked = [nothing if token is None else x[token] for token in rows.tokens]
    return torch.stack(picked) if picked else x.new_zeros(0, *x.shape[1:])


def merged(y: torch.Tensor, rows: Rows, count: int, probs: torch.Tensor | None = None) -> torch.Tensor:
    """In the dtype of ``y``, which is float64 in tests."""
    out = [torch.zeros(y.shape[1], dtype=y.dtype) for _ in range(count)]
    for row, (token, expert) in enumerate(zip(rows.tokens, rows.experts, strict=True)):
        if token is not None:
            out[token] = out[token] + y[row] * (1 if probs is None else probs[token, expert])
    return torch.stack(out) if out else y.new_zeros(0, y.shape[1])


def masks() -> dict[str, torch.Tensor]:
    """Routings of 12 tokens to 5 experts."""
    generator = torch.Generator().manual_seed(1)
    random = torch.rand(12, 5, generator=generator)
    top2 = torch.zeros(12, 5, dtype=torch.bool).scatter(1, random.topk(2).indices, value=True)
    empty = top2.clone()
    empty[:, [0, 3]] = False
    dropped = top2.clone()
    dropped[[0, 5, 11]] = False
    return {
        "two_each": top2,
        "as_it_comes": random > 0.5,
        "empty_experts": empty,
        "dropped_tokens": dropped,
        "all_to_one": torch.arange(5).eq(2).expand(12, 5).clone(),
        "everything": torch.ones(12, 5, dtype=torch.bool),
        "nothing": torch.zeros(12, 5, dtype=torch.bool),
        "no_tokens": torch.zeros(0, 5, dtype=torch.bool),
    }
