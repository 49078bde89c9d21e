"""Sequences of different lengths: where each begins and ends, in one row of tokens ("thd") or padded to one length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_hal.modules.attention.masks import Padding
from te_hal.schema.errors import ArgumentError

_INTS = (torch.int32, torch.int64)


class Sequences(NamedTuple):
    """Sequences of queries or keys.

    Attributes:
        starts: int64 ``[b]``, the first token of each in its row of tokens; 0 for each where they are padded.
        lengths: int64 ``[b]``.
        longest: at least the longest length.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int

    def padding(self) -> torch.Tensor:
        """Bool ``[b, 1, 1, longest]``, True behind each sequence's end."""
        places = torch.arange(self.longest, device=self.lengths.device)
        return (places >= self.lengths.unsqueeze(1))[:, None, None]

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[t, h, d]`` as ``[b, h, longest, d]``, 0 behind each sequence's end; differentiable."""
        places = torch.arange(self.longest, device=tokens.device)
        index = (self.starts.unsqueeze(1) + places).clamp_(max=max(0, tokens.shape[0] - 1))
        if not (tokens.shape[0] and index.numel()):
            shape = (len(self.lengths), tokens.shape[1], self.longest, tokens.shape[2])
            return tokens.new_zeros(shape) + nothing_of(tokens)
        chosen = tokens.index_select(0, index.view(-1)).view(*index.shape, *tokens.shape[1:])
        behind = self.padding()[:, 0, 0, :, None, None]
        return chosen.masked_fill(behind, 0.0).transpose(1, 2)

    def packed(self, padded: torch.Tensor, tokens: int) -> torch.Tensor:
        """``[b, h, longest, d]`` as ``[tokens, h, d]``, 0 between sequences; differentiable."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        if not (tokens and rows.shape[0]):
            return rows.new_zeros(tokens, *rows.shape[1:]) + nothing_of(rows)
        owner, place = self.places(tokens)
        inside = (owner >= 0) & (place < self.lengths[owner.clamp(min=0)])
        index = (owner * self.longest + place).masked_fill(~inside, 0)
        return rows.index_select(0, index).masked_fill(~inside.view(-1, 1, 1), 0.0)

    def places(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each of ``tokens`` tokens the sequence that starts last before it (-1: none), and its place behind it."""
        token = torch.arange(tokens, device=self.starts.device)
        owner = torch.searchsorted(self.starts, token, right=True) - 1
        return owner, token - self.starts[owner.clamp(min=0)]


def nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """A 0 that autograd leads back to the tensor, so that what is made of none of it has a gradient, too."""
    return tensor[:0].sum()


def padding_of(queries: Sequences, keys: Sequences) -> Padding:
    """The padding of both."""
    return Padding(queries.padding(), keys.padding())


def check_cumulative(where: str, given: object, device: torch.device, batch: int | None = None) -> torch.Tensor:
    """Cumulative lengths, as int64.

    The values too where they can be read without waiting for a device.

    Args:
        where: the module and the argument, for messages.
        given: int32 or int64 ``[b + 1]``, from 0 on, none smaller than the one before.
        device: of the tokens.
        batch: b, where it is known.

    Raises:
        ArgumentError: anything else.
    """
    accepted = f"int32 or int64 on {device}, [{'b' if batch is None else batch} + 1], from 0 on, never falling"
    if not isinstance(given, torch.Tensor):
        got = repr(given)
    elif given.dtype not in _INTS or given.dim() != 1 or given.device != device or given.shape[0] < 1:
        got = f"{given.dtype} {tuple(given.shape)} on {given.device}"
    elif batch is not None and given.shape[0] != batch + 1:
        got = f"{given.shape[0]} numbers for a batch of {batch}"
    elif device.type == "cpu" and (int(given[0]) != 0 or bool((given.diff() < 0).any())):
        got = str(given.tolist())
    else:
        return given.to(torch.int64)
    raise ArgumentError(where, got=got, accepted=accepted, todo="correct it: where each sequence begins, then the end")


def packed_sequences(
    where: str, name: str, cumulative: object, padded: object, longest: object, tokens: torch.Tensor
) -> Sequences:
    """Sequences in one row of tokens.

    Args:
        where: the module, for messages.
        name: "q" or "kv", as the arguments' names end.
        cumulative: ``cu_seqlens``.
        padded: ``cu_seqlens_padded``: where each sequence begins in memory; None: right behind the one before.
        longest: ``max_seqlen``; None: read from the lengths, for which the caller waits for the device.
        tokens: ``[t, ...]``.

    Raises:
        ArgumentError: missing or wrong numbers, sequences that overlap or reach beyond the tokens, a ``longest`` below
            a length.
    """
    argument = f"{where}: cu_seqlens_{name}"
    ends = check_cumulative(argument, cumulative, tokens.device)
    lengths = ends.diff()
    if padded is None:
        starts = ends
    else:
        starts = check_cumulative(f"{argument}_padded", padded, tokens.device, ends.shape[0] - 1)
        if tokens.device.type == "cpu" and bool((starts.diff() < lengths).any()):
            raise ArgumentError(
                f"{argument}_padded",
                got=f"{starts.tolist()} for lengths {lengths.tolist()}",
                accepted="room for each sequence before the next begins",
                todo="correct one of the two",
            )
    if tokens.device.type == "cpu" and int(starts[-1]) > tokens.shape[0]:
        raise ArgumentError(
            argument if padded is None else f"{argument}_padded",
            got=f"{int(starts[-1])} tokens by its last number",
            accepted=f"at most {tokens.shape[0]}, the tokens that are there",
            todo="correct it, or pass all tokens",
        )
    return Sequences(starts[:-1], lengths, _longest(f"{where}: max_seqlen_{name}", lengths, longest))


def padded_sequences(
    where: str, name: str, cumulative: object, longest: object, batch: int, length: int, device: torch.device
) -> Sequences:
    """Sequences at the front of rows of one length.

    Args:
        where: the module, for messages.
        name: "q" or "kv", as the arguments' names end.
        cumulative: ``cu_seqlens``, of which lengths are taken.
        longest: ``max_seqlen``; None: ``length``.
        batch: how many there are.
        length: of a row.
        device: of the tokens.

    Raises:
        ArgumentError: missing or wrong numbers, a sequence longer than its row, another ``longest`` than ``length``.
    """
    argument = f"{where}: cu_seqlens_{name}"
    lengths = check_cumulative(argument, cumulative, device, batch).diff()
    if device.type == "cpu" and batch and int(lengths.max()) > length:
        raise ArgumentError(
            argument, got=f"lengths {lengths.tolist()}", accepted=f"at most {length}, a row's", todo="correct it"
        )
    check_row_length(where, name, longest, length)
    return Sequences(torch.zeros_like(lengths), lengths, length)


def check_row_length(where: str, name: str, longest: object, length: int) -> None:
    """``max_seqlen`` of rows of one length: that length, or None.

    Raises:
        ArgumentError: anything else.
    """
    if longest is not None and (isinstance(longest, bool) or longest != length):
        raise ArgumentError(
            f"{where}: max_seqlen_{name}",
            got=repr(longest),
            accepted=f"{length}, which every row has, or None",
            todo='leave it out: it counts for packed sequences, qkv_format="thd"',
        )


def _longest(where: str, lengths: torch.Tensor, given: object) -> int:
    if given is None:
        return int(lengths.max()) if lengths.shape[0] else 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ArgumentError(where, got=repr(given), accepted="an int, at least the longest length", todo="correct it")
    if lengths.device.type == "cpu" and lengths.shape[0] and int(lengths.max()) > given:
        raise ArgumentError(
            where, got=str(given), accepted=f"at least {int(lengths.max())}, the longest sequence", todo="correct it"
        )
    return given
