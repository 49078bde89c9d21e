"""What Transformer Engine's mask types hide. In every mask True hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable


class MaskRule(NamedTuple):
    """A mask type.

    Attributes:
        causal: where the diagonal starts that no key may lie behind: "top_left", "bottom_right"; "none": nowhere.
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
    "padding_causal_bottom_right": MaskRule("bottom_right", "padding"),
    "arbitrary": MaskRule("none", "arbitrary"),
}

#: Other orders of the words.
_SAME = {
    "causal_padding": "padding_causal",
    "causal_padding_bottom_right": "padding_causal_bottom_right",
    "causal_bottom_right_padding": "padding_causal_bottom_right",
}

#: Where every sequence has its own length, a type that names no padding says as much as the one that does.
WITH_PADDING = {
    "no_mask": "padding",
    "causal": "padding_causal",
    "causal_bottom_right": "padding_causal_bottom_right",
}


def mask_type(where: str, given: object) -> str:
    """The name of a mask type as RULES has it; "padding,causal" and "causal,padding" are padding_causal.

    Raises:
        ArgumentError: none at all.
    """
    name = given.replace(",", "_") if isinstance(given, str) else ""
    name = _SAME.get(name, name)
    if name in RULES:
        return name
    raise ArgumentError(where, got=repr(given), accepted=", ".join(RULES), todo="correct it")


class Padding(NamedTuple):
    """Which tokens are none: bool ``[b, 1, 1, sq]`` of queries, ``[b, 1, 1, sk]`` of keys."""

    queries: torch.Tensor
    keys: torch.Tensor

    def hidden(self) -> torch.Tensor:
        """``[b, 1, sq, sk]``: a query that is padding sees nothing, a key that is padding is seen by none."""
        return self.queries.transpose(-1, -2) | self.keys

    def offsets(self) -> torch.Tensor:
        """``[b]``: the position among the keys of the first query, the last token of both being in one place."""
        return _last(self.keys) - _last(self.queries)


def _last(padding: torch.Tensor) -> torch.Tensor:
    """``[b]``, int64: index of the last token, -1 where there is none."""
    present = ~padding[:, 0, 0]
    places = torch.arange(1, present.shape[1] + 1, device=padding.device)
    return (present * places).amax(-1) - 1 if present.shape[1] else places.new_full((present.shape[0],), -1)


def arbitrary(where: str, mask: object, scores: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """A mask that broadcasts to ``scores``, ``(b, h, sq, sk)``.

    Raises:
        ArgumentError: a tensor that is missing, or of another shape, dtype or device.
    """

    def broadcasts(shape: tuple[int, ...]) -> bool:
        pairs = zip(reversed(shape), reversed(scores), strict=False)
        return len(shape) <= len(scores) and all(size in (1, full) for size, full in pairs)

    accepted = f"bool, broadcasts to {scores}, True where a key is hidden"
    return _checked(f"{where}: attention_mask", mask, accepted, device, broadcasts)


def padding(where: str, given: object, scores: tuple[int, int, int, int], device: torch.device) -> Padding:
    """Padding of queries and keys, from one mask for both or a pair.

    Args:
        where: the module, for messages.
        given: ``[b, 1, 1, s]``, or a pair ``[b, 1, 1, sq]``, ``[b, 1, 1, sk]``.
        scores: ``(b, h, sq, sk)``.
        device: of the queries.

    Raises:
        ArgumentError: a tensor that is missing, too much, or of another shape, dtype or device.
    """
    where = f"{where}: attention_mask"
    batch, _, queries, keys = scores
    if isinstance(given, (tuple, list)):
        if len(given) != 2:  # noqa: PLR2004 - said in the message
            accepted = "two masks, of the queries and of the keys"
            raise ArgumentError(where, got=f"{len(given)} masks", accepted=accepted, todo="pass two, or one for both")
        first, second = (
            _exactly(where, mask, (batch, 1, 1, length), device)
            for mask, length in zip(given, (queries, keys), strict=True)
        )
        return Padding(first, second)
    if queries != keys:
        raise ArgumentError(
            where,
            got=f"one mask for {queries} queries and {keys} keys",
            accepted=f"two: [{batch}, 1, 1, {queries}] of the queries and [{batch}, 1, 1, {keys}] of the keys",
            todo="pass a tuple (queries, keys)",
        )
    both = _exactly(where, given, (batch, 1, 1, queries), device)
    return Padding(both, both)


def _exactly(where: str, mask: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return _checked(where, mask, f"bool {shape}, True where a token is padding", device, lambda s: s == shape)


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
