"""A mask tensor under a mask type that has none: taken where it hides nothing that the type does not hide anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from te_hal.modules.attention.masks import arbitrary
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from te_hal.modules.attention.visibility import Visibility

#: What masks were last found to say no more than; all layers of a model get the same one.
_FOUND = WeakIdKeyDictionary()


def check_redundant(
    where: str,
    name: str,
    mask: object,
    visibility: Visibility,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> None:
    """Refuse a mask that hides what its mask type and window let be seen.

    A look at a mask on a device waits for that device, once for each mask, until something is written to it.

    Args:
        where: the module, for messages.
        name: the mask type, one without a mask tensor.
        mask: the caller's; None: none.
        visibility: what mask type and window hide.
        sizes: ``(b, h, sq, sk)``.
        device: that of the operands.

    Raises:
        ArgumentError: a mask that hides more; no bool tensor that broadcasts to ``sizes``.
    """
    if mask is None:
        return
    given = arbitrary(where, mask, sizes, device)
    of_window = (visibility.window, visibility.offset, sizes[2:])
    known = None if given.is_inference() or isinstance(visibility.offset, torch.Tensor) else (given._version, of_window)  # noqa: SLF001 - torch has no public reader
    if known is not None and _FOUND.get(given) == known:  # type: ignore[no-untyped-call]
        return
    hidden = visibility.everything_hidden(sizes, device)
    if bool((given if hidden is None else given & ~hidden).any()):
        raise ArgumentError(
            f"{where}: attention_mask",
            got=f"a mask under attn_mask_type={name!r} that hides more",
            accepted=f"None, or a mask that hides nothing but what {name} hides",
            todo='leave the mask out, or choose "padding", "padding_causal" or "arbitrary"',
        )
    if known is not None:
        _FOUND[given] = known
