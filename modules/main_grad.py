"""Gradient accumulation into ``weight.main_grad`` (fuse_wgrad_accumulation): one page, all rules.

========================  =========================================================================================
is_first_microbatch       what wgrad does to main_grad
========================  =========================================================================================
None                      adds
True                      the first wgrad since this forward overwrites, further ones add
False                     adds; while the backward of the last ``True`` forward is still to come, it counts as that
========================  =========================================================================================

So a layer used twice under True overwrites, then adds, and several microbatches may share one backward, which runs
them last to first. ``weight.overwrite_main_grad = True`` always overwrites. ``weight.__fsdp_param__`` means that
main_grad comes from ``weight.get_main_grad()``, asked in the backward only. A backward that leaves the weight out
(``backward(inputs=...)``, ``autograd.grad``) leaves main_grad alone. Autograd gets no gradient for the weight, except
where the weight has an attribute ``grad_added_to_main_grad``: that is set to True and a gradient of zeros keeps the
caller's hooks running.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import get_gradient_edge

from te_hal.schema.errors import StateError
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable

#: Of the parts of a stacked weight: the parameter.
PART_OF = "te_hal_part_of"
#: Of weights whose main_grad is made lazily.
_GETTER = "get_main_grad"


class FirstMicrobatch:
    """Shared by all uses of a weight since a first microbatch; remembers whether main_grad was overwritten."""

    __slots__ = ("__weakref__", "overwritten")

    def __init__(self) -> None:
        self.overwritten = False

    def take_overwrite(self) -> bool:
        """True for the first wgrad, False for later ones."""
        first = not self.overwritten
        self.overwritten = True
        return first


class Microbatches:
    """The first microbatch of one layer that still waits for its backward, if any.

    Only graphs keep it: when the last graph that could overwrite main_grad is gone, nothing waits.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: weakref.ref[FirstMicrobatch] | None = None

    def __reduce__(self) -> tuple[type[Microbatches], tuple[()]]:
        """A copied or pickled layer has no graph that waits."""
        return Microbatches, ()

    def note(self, is_first_microbatch: bool | None) -> FirstMicrobatch | None:
        """What the wgrad of a forward with this flag belongs to."""
        if is_first_microbatch is None:
            return None
        waiting = self._waiting() if self._waiting is not None else None
        if waiting is not None and not waiting.overwritten:
            return waiting
        if not is_first_microbatch:
            return None
        first = FirstMicrobatch()
        self._waiting = weakref.ref(first)
        return first


def main_grad_dtype(module: str, weight: torch.Tensor) -> torch.dtype:
    """The dtype that a wgrad will be written in, known in the forward.

    A main_grad that is made lazily (``weight.get_main_grad``) is taken to be fp32 while there is none.

    Raises:
        StateError: the weight has no main_grad, or one of another dtype, shape or device than a wgrad can go into.
    """
    if _makes_main_grad(weight) and not isinstance(getattr(weight, "main_grad", None), torch.Tensor):
        return torch.float32
    return _checked(module, weight, getattr(weight, "main_grad", None)).dtype


def main_grad_of(module: str, weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that wgrad goes into, in the backward.

    Raises:
        StateError: as :func:`main_grad_dtype`; or its dtype is not ``dtype``, the one that the forward planned for.
    """
    if _makes_main_grad(weight):
        make: Callable[[], torch.Tensor] = getattr(weight, _GETTER)
        main_grad = _checked(module, weight, make())
    else:
        main_grad = _checked(module, weight, getattr(weight, "main_grad", None))
    if main_grad.dtype != dtype:
        raise StateError(
            f"{module}: fuse_wgrad_accumulation",
            got=f"weight.main_grad of {main_grad.dtype} in the backward",
            accepted=f"{dtype}, as in the forward",
            todo="replace main_grad between a backward and the next forward only, or by one of the same dtype",
        )
    return main_grad


def _makes_main_grad(weight: torch.Tensor) -> bool:
    return hasattr(weight, "__fsdp_param__") and hasattr(weight, _GETTER)


def _checked(module: str, weight: torch.Tensor, main_grad: object) -> torch.Tensor:
    fits = (
        isinstance(main_grad, torch.Tensor)
        and main_grad.shape == weight.shape
        and main_grad.dtype in FLOATS
        and main_grad.device == weight.device
    )
    if fits and isinstance(main_grad, torch.Tensor):
        return main_grad
    got = repr(main_grad)
    if isinstance(main_grad, torch.Tensor):
        got = f"a tensor of {main_grad.dtype}, shape {tuple(main_grad.shape)}, on {main_grad.device}"
    raise StateError(
        f"{module}: fuse_wgrad_accumulation",
        got=f"weight.main_grad = {got}",
        accepted=f"a tensor of the weight's shape {tuple(weight.shape)}, on {weight.device}, in fp32, fp16 or bf16",
        todo="set weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) before the forward",
    )


def asked_for(weight: torch.Tensor) -> bool:
    """Whether the backward that runs wants this weight's gradient, which autograd does not tell a Function."""
    node = get_gradient_edge(getattr(weight, PART_OF, weight)).node
    try:
        wanted: bool = torch._C._will_engine_execute_node(node)  # noqa: SLF001 - torch's own way, without a public name
    except RuntimeError:  # torch's answer for a leaf that autograd.grad was asked about
        return True
    return wanted


def should_accumulate(weight: torch.Tensor, first: FirstMicrobatch | None) -> bool:
    """Whether a wgrad adds to main_grad (else it overwrites)."""
    overwrites = first is not None and first.take_overwrite()
    return not (overwrites or getattr(weight, "overwrite_main_grad", False))


def gradient_for_autograd(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What autograd gets once main_grad has the gradient: nothing, or zeros for hooks that must run."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)
