"""Backends made for one test: kernels that record their calls, say no, or fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import ANY_DEVICE, Backend
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def yes(call: Call) -> Support:  # noqa: ARG001 - the answer's signature
    """Support everything."""
    return SUPPORTED


def refuse(sentence: str) -> Callable[[Call], Support]:
    """Support nothing, for this reason."""
    return lambda call: Support.no(Code.DTYPE, sentence)  # noqa: ARG005


def amax_that(act: Callable[[torch.Tensor], None]) -> Callable[..., torch.Tensor]:
    """A kernel of the op amax that does something with its input and returns [1.]."""

    def amax(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        act(input)
        return torch.ones(1) if out is None else out.fill_(1.0)

    return amax


def stub(
    name: str,
    *,
    act: Callable[[torch.Tensor], None] = lambda _: None,
    supports: Callable[[Call], Support] = yes,
    serves: Iterable[str] = (ANY_DEVICE,),
    default_for: Iterable[str] = (),
    **fields: Any,
) -> Backend:
    """A backend whose one kernel is `amax`, unless `kernels` says otherwise."""
    fields.setdefault("kernels", {"amax": amax_that(act)})
    return Backend(name=name, supports=supports, serves=frozenset(serves), default_for=frozenset(default_for), **fields)
