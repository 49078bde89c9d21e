"""Second derivatives, which no backward of a module has, are refused instead of being wrong."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Backward: TypeAlias = Callable[..., tuple[torch.Tensor | None, ...]]


def once(where: Callable[[Any], str]) -> Callable[[Backward], Backward]:
    """For the ``backward`` of an autograd Function that can be differentiated once.

    torch runs a backward in grad mode exactly where its results are to be differentiated again (``create_graph=True``).
    torch's own ``once_differentiable`` lets that pass where ``grad_output`` needs no gradient: what comes out is then
    a constant, and a gradient penalty or a Hessian silently lacks its part. Hence the refusal before anything is run.

    Args:
        where: names what was differentiated, for the message, from autograd's context.

    Returns:
        A decorator. What it gives raises UnsupportedError under ``create_graph=True``, before anything has changed.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{where(ctx)}: backward",
                    got="create_graph=True, as for second derivatives (gradient penalty, Hessian)",
                    accepted="first derivatives; retain_graph=True runs a graph again",
                    todo="leave create_graph out, or use torch.nn's layers where a gradient is differentiated again",
                )
            return backward(ctx, *grads)

        return wrapper

    return decorate
