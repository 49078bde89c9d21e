"""Which keys each query may see: a mask tensor, and a window around the query's own place among the keys."""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch

from te_hal.modules.attention.masks import RULES
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags

#: A window without borders.
EVERYTHING = (-1, -1)


class SoftmaxMask(NamedTuple):
    """Arguments of softmax_fwd: a mask tensor ``hidden``, ``causal`` and ``window``."""

    hidden: torch.Tensor | None
    causal: str
    window: tuple[int, int]


class Visibility(NamedTuple):
    """What is seen.

    Attributes:
        hidden: bool, broadcasts to ``[b, h, sq, sk]``, True hides; None: no mask tensor.
        window: how many keys left and right of a query's place are seen; -1: all. A causal mask is a 0 on the right.
        offset: the place of the first query among the keys; a tensor ``[b]`` where every sequence has its own.
    """

    hidden: torch.Tensor | None
    window: tuple[int, int]
    offset: int | torch.Tensor

    def diagonal(self, queries: int, keys: int) -> tuple[str, tuple[int, int]] | None:
        """``causal`` and ``window`` of softmax_fwd that say the same; None: none do, or there are several offsets."""
        left, right = self.window
        if self.window == EVERYTHING:
            return "none", EVERYTHING
        if isinstance(self.offset, torch.Tensor):
            return None
        if self.offset == 0:
            return ("top_left", (left, -1)) if right == 0 else ("none", self.window)
        return ("bottom_right", (left, -1)) if right == 0 and self.offset == keys - queries else None

    def everything_hidden(self, sizes: tuple[int, int, int, int], device: torch.device) -> torch.Tensor | None:
        """Bool, broadcasts to ``sizes``: mask tensor and window in one; None where nothing is hidden."""
        if self.window == EVERYTHING:
            return self.hidden
        left, right = self.window
        place = query_places(self.offset, sizes[2], device)
        key = torch.arange(sizes[3], device=device)
        outside = torch.zeros((*place.shape[:-1], sizes[3]), dtype=torch.bool, device=device)
        if left >= 0:
            outside |= key < place - left
        if right >= 0:
            outside |= key > place + right
        return outside if self.hidden is None else outside | self.hidden

    def sees_something(self, queries: int, keys: int) -> bool:
        """Whether every query is known to see a key, without a look at any tensor."""
        if self.hidden is not None or isinstance(self.offset, torch.Tensor) or not keys:
            return False
        return self.window == EVERYTHING or (self.offset >= 0 and self.offset + queries <= keys)


def query_places(offset: int | torch.Tensor, queries: int, device: torch.device) -> torch.Tensor:
    """Place of each query among the keys, ``[1 or b, 1, sq, 1]``."""
    place = torch.arange(queries, device=device).view(1, 1, queries, 1)
    return place + (offset.view(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset)


def check_window(where: str, window: object, name: str) -> tuple[int, int]:
    """The window of a mask type: ``(left, right)``, -1 for no border; a causal type sees nothing on the right.

    Args:
        where: the module, for messages.
        window: a pair of ints; None: no borders but the mask type's.
        name: mask type, of masks.RULES.

    Raises:
        ArgumentError: no pair of ints of at least -1; (-1, 0), which is a causal mask, under a type that is none.
    """
    causal = RULES[name].causal != "none"
    if window is None:
        return (-1, 0) if causal else EVERYTHING
    if not _is_window(window):
        raise ArgumentError(
            f"{where}: window_size",
            got=repr(window),
            accepted="a pair (left, right) of ints, how many keys are seen on either side of a query; -1: all",
            todo="correct it",
        )
    left, right = window
    if causal:
        return left, 0
    if (left, right) == (-1, 0):
        raise ArgumentError(
            f"{where}: window_size",
            got=f"(-1, 0) under attn_mask_type={name!r}: a causal mask, which Transformer Engine does not apply there",
            accepted="(-1, -1) for every key, or a causal mask type",
            todo='choose "causal" or "padding_causal" to hide what comes later, else leave window_size out',
        )
    return left, right


def _is_window(window: object) -> TypeGuard[tuple[int, int]]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:  # noqa: PLR2004 - said in the message
        return False
    return all(isinstance(border, int) and not isinstance(border, bool) and border >= -1 for border in window)


def is_bottom_right(where: str, given: object, name: str, standing: bool | None) -> bool:
    """Whether the last query stands at the last key, instead of the first at the first.

    Args:
        where: the module, for messages.
        given: the caller's wish; None: as the mask type says, else ``standing``, else yes.
        name: mask type, of masks.RULES.
        standing: the module's own setting, for mask types that leave it open.

    Raises:
        ArgumentError: no bool; a wish that contradicts the mask type.
    """
    causal = RULES[name].causal
    if given is None:
        return causal == "bottom_right" if causal != "none" else standing is not False
    check_flags(where, {"bottom_right_diagonal": given})
    if causal != "none" and given is not (causal == "bottom_right"):
        other = name.removesuffix("_bottom_right") if causal == "bottom_right" else f"{name}_bottom_right"
        raise ArgumentError(
            f"{where}: bottom_right_diagonal",
            got=f"{given} under attn_mask_type={name!r}, which says where its diagonal lies",
            accepted=f"{not given} or None",
            todo=f"choose attn_mask_type={other!r}",
        )
    return bool(given)
