"""What a step of generation may announce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError

if TYPE_CHECKING:
    from collections.abc import Hashable


def check_announced(where: str, step: object, most_tokens: int, most_sequences: int) -> None:
    """Refuse what says no number of new tokens for each of some sequences.

    Args:
        where: the call, for messages.
        step: what was given; right is a mapping from a sequence's id to its number of new tokens.
        most_tokens: of one sequence.
        most_sequences: at once.

    Raises:
        ArgumentTypeError: no mapping.
        ArgumentError: no sequence; a number that is none, or too large.
        StateError: too many sequences.
    """
    if not isinstance(step, Mapping):
        got, accepted = f"a {type(step).__name__}", "a dict from a sequence's id to its number of new tokens"
        raise ArgumentTypeError(where, got=got, accepted=accepted, todo="name the sequences: {id: new tokens, ...}")
    if not step:
        raise ArgumentError(
            where,
            got="no sequence",
            accepted="at least one: {id: new tokens, ...}",
            todo="name those of the next forward; to have all of them leave, call reset()",
        )
    for sequence, new in step.items():
        if isinstance(new, bool) or not isinstance(new, int) or not 0 <= new <= most_tokens:
            raise ArgumentError(
                f"{where}: sequence {sequence!r}",
                got=repr(new),
                accepted=f"a number of new tokens, from 0 to {most_tokens} (max_ctx_len)",
                todo="correct it, or feed a long prompt in several steps",
            )
    if len(step) > most_sequences:
        raise StateError(
            where,
            got=f"{len(step)} sequences",
            accepted=f"at most max_batch_size={most_sequences}",
            todo="leave some out, or make a larger cache",
        )


def check_lengths(where: str, before: Mapping[Hashable, int], after: Mapping[Hashable, int], longest: int) -> None:
    """Refuse sequences that would outgrow the cache.

    Args:
        where: the call, for messages.
        before: tokens of each sequence.
        after: with those of the step.
        longest: the most of one sequence.

    Raises:
        StateError: one has more.
    """
    for sequence, length in after.items():
        if length > longest:
            raise StateError(
                where,
                got=f"sequence {sequence!r} with {before[sequence]} tokens and {length - before[sequence]} more",
                accepted=f"at most max_sequence_length={longest}",
                todo="leave it out, which evicts it, or make the cache for longer sequences",
            )
