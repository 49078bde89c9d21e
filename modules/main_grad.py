"""Gradient accumulation into ``weight.main_grad`` (fuse_wgrad_accumulation): one page, all rules.

========================  =========================================================================================
is_first_microbatch       what wgrad does to main_grad
========================  =========================================================================================
None, False               adds
True                      overwrites, once per first microbatch: a layer used twice overwrites, then adds
========================  =========================================================================================

``weight.overwrite_main_grad = True`` always overwrites. ``weight.__fsdp_param__`` means that main_grad comes from
``weight.get_main_grad()``. Autograd gets no gradient for the weight, except where the weight has an attribute
``grad_added_to_main_grad``: that is set to True and a gradient of zeros keeps the caller's hooks running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable


class FirstMicrobatch:
    """Shared by all uses of a weight in one first microbatch; remembers whether its main_grad was overwritten."""

    __slots__ = ("overwritten",)

    def __init__(self) -> None:
        self.overwritten = False

    def take_overwrite(self) -> bool:
        """True for the first wgrad, False for later ones."""
        first = not self.overwritten
        self.overwritten = True
        return first


def main_grad_of(module: str, weight: torch.Tensor) -> torch.Tensor:
    """The tensor that wgrad goes into.

    Raises:
        StateError: the weight has none.
    """
    getter: Callable[[], torch.Tensor] | None = getattr(weight, "get_main_grad", None)
    if hasattr(weight, "__fsdp_param__") and getter is not None:
        return getter()
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        raise StateError(
            f"{module}: fuse_wgrad_accumulation",
            got=f"weight.main_grad = {main_grad!r}",
            accepted="a tensor of the weight's shape",
            todo="set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before the forward",
        )
    return main_grad


def should_accumulate(weight: torch.Tensor, first: FirstMicrobatch | None) -> bool:
    """Whether a wgrad adds to main_grad (else it overwrites)."""
    if getattr(weight, "overwrite_main_grad", False):
        return False
    return first is None or not first.take_overwrite()


def gradient_for_autograd(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What autograd gets once main_grad has the gradient: nothing, or zeros for hooks that must run."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)
