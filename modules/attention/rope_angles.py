"""Which angle each token is rotated by, wherever its sequence begins."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_hal.modules.arguments import check_size
from te_hal.modules.attention.layout import PACKED
from te_hal.modules.attention.packing import Sequences, check_cumulative
from te_hal.schema.errors import ArgumentError

_SHAPES = {"sbhd": "[s, b, h, d]", "bshd": "[b, s, h, d]", PACKED: "[t, h, d]"}


class Part(NamedTuple):
    """Which of each sequence's 2 ``size`` equal pieces are here: number ``rank``, and ``rank`` from the end."""

    size: int
    rank: int

    def positions(self, place: torch.Tensor, here: int | torch.Tensor) -> torch.Tensor:
        """Where in its sequence a token stands that is number ``place`` of the ``here`` that are here."""
        if self.size == 1:
            return place
        piece = here // 2
        return place + piece * torch.where(place < piece, self.rank, 2 * self.size - self.rank - 2)


def checked_part(where: str, cp_size: object, cp_rank: object, start_positions: object) -> Part:
    """The part of every sequence that one of ``cp_size`` processes holds.

    Raises:
        ArgumentError: no size and rank of that many; start positions beside them.
    """
    size = check_size(f"{where}: cp_size", cp_size)
    if type(cp_rank) is not int or not 0 <= cp_rank < size:
        got, accepted = repr(cp_rank), f"an int from 0 to {size - 1}, below cp_size"
        raise ArgumentError(f"{where}: cp_rank", got=got, accepted=accepted, todo="correct it")
    if size > 1 and start_positions is not None:
        raise ArgumentError(
            f"{where}: start_positions",
            got=f"a value with cp_size={size}",
            accepted="None where sequences are in parts",
            todo="leave one of the two out",
        )
    return Part(size, cp_rank)


def chosen_angles(
    where: str,
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str,
    start_positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    part: Part,
) -> torch.Tensor:
    """The angles of t's positions, in a shape that broadcasts to its rotated part.

    Args:
        where: for messages.
        t: in ``tensor_format``.
        freqs: ``[s2, 1, 1, rotated]``.
        tensor_format: of layout.FORMATS.
        start_positions: ``[b]``, or None for 0.
        cu_seqlens: for "thd" alone; of whole sequences.
        part: which tokens of each sequence ``t`` holds.

    Raises:
        ArgumentError: shapes, devices or positions that do not fit; sequences that part cannot cut evenly.
    """
    if t.dim() != len(tensor_format):
        got = f"shape {tuple(t.shape)}"
        raise ArgumentError(f"{where}: t", got=got, accepted=_SHAPES[tensor_format], todo="correct tensor_format or t")
    if (cu_seqlens is None) is (tensor_format == PACKED):
        raise ArgumentError(
            f"{where}: cu_seqlens",
            got=f"{'None' if cu_seqlens is None else 'a value'} with tensor_format={tensor_format!r}",
            accepted='where packed sequences begin, with "thd"; None without',
            todo="correct one of the two",
        )
    if cu_seqlens is not None:
        return _of_packed(where, t, freqs, start_positions, cu_seqlens, part)
    sequence, batch = t.shape[:2] if tensor_format == "sbhd" else (t.shape[1], t.shape[0])
    rotated = _check_freqs(where, t, freqs, sequence * part.size)
    if part.size > 1:
        _check_pieces(f"{where}: t", sequence, 2)
        chosen = freqs.index_select(0, part.positions(torch.arange(sequence, device=freqs.device), sequence))
    elif start_positions is None:
        chosen = freqs[:sequence]
    else:
        _check_starts(where, start_positions, batch, last=freqs.shape[0] - sequence)
        positions = start_positions.to(freqs.device) + torch.arange(sequence, device=freqs.device).unsqueeze(1)
        # Unlike an index in brackets this takes no negative position for one from the end.
        chosen = freqs[:, 0].index_select(0, positions.reshape(-1)).view(sequence, batch, 1, rotated)
    return chosen if tensor_format == "sbhd" else chosen.transpose(0, 1)


def _of_packed(
    where: str,
    t: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    part: Part,
) -> torch.Tensor:
    """``[t, 1, rotated]``; the angle 0 outside of sequences."""
    ends = check_cumulative(f"{where}: cu_seqlens", cu_seqlens, t.device)
    lengths = ends.diff()
    readable = t.device.type == "cpu" and lengths.shape[0] > 0
    if part.size > 1:
        if readable:
            _check_pieces(f"{where}: cu_seqlens", int((lengths % (2 * part.size)).max()), 2 * part.size)
        ends, lengths = ends // part.size, lengths // part.size
    longest = int(lengths.max()) if readable else 0
    if readable and int(ends[-1]) > t.shape[0]:
        raise ArgumentError(
            f"{where}: cu_seqlens",
            got=f"{int(ends[-1])} tokens by its last number",
            accepted=f"at most {t.shape[0]}, the tokens that are there",
            todo="correct it",
        )
    rotated = _check_freqs(where, t, freqs, longest * part.size)
    if start_positions is not None:
        _check_starts(where, start_positions, lengths.shape[0], last=freqs.shape[0] - longest)
    if not (t.shape[0] and lengths.shape[0]):
        return freqs.new_zeros(t.shape[0], 1, rotated)
    owner, place = Sequences(ends[:-1], lengths, longest).places(t.shape[0])
    inside = place < lengths[owner]
    place = part.positions(place, lengths[owner])
    if start_positions is not None:
        place = place + start_positions.to(t.device)[owner]
    chosen = freqs[:, 0].index_select(0, place.masked_fill(~inside, 0))
    return chosen.masked_fill(~inside.view(-1, 1, 1), 0.0)


def _check_pieces(where: str, tokens: int, pieces: int) -> None:
    if tokens % pieces:
        raise ArgumentError(
            where,
            got=f"sequences that do not make {pieces} equal pieces with these cp_size and tensor_format",
            accepted=f"lengths that are multiples of {pieces}",
            todo="pad each sequence",
        )


def _check_freqs(where: str, t: torch.Tensor, freqs: torch.Tensor, longest: int) -> int:
    """The number of rotated channels.

    Raises:
        ArgumentError: freqs of another shape or device, or too few for the longest sequence.
    """
    rotated = freqs.shape[-1] if freqs.dim() else 0
    fits = freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and 0 < rotated <= t.shape[-1] and rotated % 2 == 0  # noqa: PLR2004
    if not fits or freqs.shape[0] < longest or freqs.device != t.device:
        raise ArgumentError(
            f"{where}: freqs",
            got=f"shape {tuple(freqs.shape)} on {freqs.device} for t {tuple(t.shape)} on {t.device}",
            accepted=f"[at least {longest}, 1, 1, an even number up to {t.shape[-1]}] on the same device",
            todo="make angles with RotaryPositionEmbedding(dim)(max_seq_len)",
        )
    return rotated


def _check_starts(where: str, starts: object, batch: int, *, last: int) -> None:
    """The values too where they can be read without waiting for a device."""
    if isinstance(starts, torch.Tensor) and starts.shape == (batch,) and starts.dtype in (torch.int32, torch.int64):
        if starts.device.type != "cpu" or batch == 0 or (int(starts.min()) >= 0 and int(starts.max()) <= last):
            return
        got = f"positions from {int(starts.min())} to {int(starts.max())}"
    else:
        got = f"{starts.dtype} {tuple(starts.shape)}" if isinstance(starts, torch.Tensor) else repr(starts)
    raise ArgumentError(
        f"{where}: start_positions",
        got=got,
        accepted=f"an int32 or int64 tensor [{batch}], a position from 0 to {last} for each sequence",
        todo="correct it, leave it out, or make freqs longer",
    )
