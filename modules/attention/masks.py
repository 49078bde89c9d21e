"""What Transformer Engine's mask types hide. In every mask True hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable


class MaskRule(NamedTuple):
    """A mask type.

    Attributes:
        causal: how softmax_fwd aligns the causal part: "none", "top_left", "bottom_right".
        tensor: what ``attention_mask`` says: "padding" (which tokens are none), "arbitrary" (which keys each query may
            not see), or "" where there is none.
    """

    causal: str
    tensor: str


RULES = {
    "no_mask": MaskRule("none", ""),
    "causal": MaskRule("top_left", ""),
    "causal_bottom_right": MaskRule("bottom_right", ""),
    "padding": MaskRule("none", "padding"),
    "padding_causal": MaskRule("top_left", "padding"),
    "arbitrary": MaskRule("none", "arbitrary"),
}

#: Other orders of the words.
_SAME = {"causal_padding": "padding_causal"}

_LATER = {
    "padding_causal_bottom_right": "a causal mask aligned to each sequence's own end is not built yet",
}


def mask_type(where: str, given: object) -> str:
    """The name of a mask type as RULES has it; "padding,causal" and "causal,padding" are padding_causal.

    Raises:
        UnsupportedError: one of Transformer Engine that is not here.
        ArgumentError: none at all.
    """
    name = given.replace(",", "_") if isinstance(given, str) else ""
    name = _SAME.get(name, name)
    if name in RULES:
        return name
    if name in _LATER:
        todo = f"use another mask type: {_LATER[name]}"
        raise UnsupportedError(where, got=repr(given), accepted=", ".join(RULES), todo=todo)
    raise ArgumentError(where, got=repr(given), accepted=", ".join(RULES), todo="correct it")


def hidden_keys(
    where: str, name: str, attention_mask: object, scores: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor | None:
    """Which key each query may not see, the causal part aside.

    Args:
        where: the module, for messages.
        name: mask type, of RULES.
        attention_mask: as DotProductAttention takes it.
        scores: sizes ``(b, h, sq, sk)``.
        device: of the queries.

    Returns:
        bool, broadcasts to ``scores``; None where the mask type has no tensor. A query that is padding sees nothing.

    Raises:
        ArgumentError: a tensor that is missing, too much, or of another shape, dtype or device.
    """
    tensor = RULES[name].tensor
    where = f"{where}: attention_mask"
    if not tensor:
        if attention_mask is None:
            return None
        raise ArgumentError(
            where,
            got=f"a mask under attn_mask_type={name!r}",
            accepted=f"None: {name} hides no more than its name says",
            todo='leave the mask out, or choose "padding", "padding_causal" or "arbitrary"',
        )
    if tensor == "arbitrary":
        return _one(where, attention_mask, scores, device)
    queries, keys = _padding(where, attention_mask, scores, device)
    return queries.transpose(-1, -2) | keys


def _padding(
    where: str, given: object, scores: tuple[int, int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding of queries ``[b, 1, 1, sq]`` and keys ``[b, 1, 1, sk]``."""
    batch, _, queries, keys = scores
    if isinstance(given, (tuple, list)):
        if len(given) != 2:  # noqa: PLR2004 - said in the message
            accepted = "two masks, of the queries and of the keys"
            raise ArgumentError(where, got=f"{len(given)} masks", accepted=accepted, todo="pass two, or one for both")
        first, second = (
            _exactly(where, mask, (batch, 1, 1, length), device)
            for mask, length in zip(given, (queries, keys), strict=True)
        )
        return first, second
    if queries != keys:
        raise ArgumentError(
            where,
            got=f"one mask for {queries} queries and {keys} keys",
            accepted=f"two: [{batch}, 1, 1, {queries}] of the queries and [{batch}, 1, 1, {keys}] of the keys",
            todo="pass a tuple (queries, keys)",
        )
    both = _exactly(where, given, (batch, 1, 1, queries), device)
    return both, both


def _exactly(where: str, mask: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _checked(where, mask, f"bool {shape}, True where a token is padding", device, lambda s: s == shape)


def _one(where: str, mask: object, scores: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    def broadcasts(shape: tuple[int, ...]) -> bool:
        pairs = zip(reversed(shape), reversed(scores), strict=False)
        return len(shape) <= len(scores) and all(size in (1, full) for size, full in pairs)

    return _checked(where, mask, f"bool, broadcasts to {scores}, True where a key is hidden", device, broadcasts)


def _checked(
    where: str, mask: object, accepted: str, device: torch.device, fits: Callable[[tuple[int, ...]], bool]
) -> torch.Tensor:
    if (
        isinstance(mask, torch.Tensor)
        and mask.dtype is torch.bool
        and mask.device == device
        and fits(tuple(mask.shape))
    ):
        return mask
    got = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}" if isinstance(mask, torch.Tensor) else repr(mask)
    todo = f"make it on {device}, for example by comparing token ids with the one that pads"
    raise ArgumentError(where, got=got, accepted=accepted, todo=todo)
