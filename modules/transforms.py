"""What program transforms of torch meet in a module: torch.compile runs it as it is, torch.func is refused."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from te_hal.modules.whereabouts import locate
from te_hal.schema.errors import TeHalError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def run_eagerly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep a module's ``function`` out of what torch.compile compiles: compiled code calls it as it stands.

    An error of a forward is told where in the model the module stands.

    Kernels are chosen, counted and bit-exact as they are written. A compiler that traced them would compile one
    choice and round where it likes.

    ``torch.compiler.disable`` loads torch's compiler, which takes more than a second; so it is applied at the first
    call that finds the compiler loaded.
    """
    disabled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if disabled:
                return disabled[0](*args, **kwargs)
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            return disabled[0](*args, **kwargs)
        except TeHalError as error:
            locate(error, args[0] if args else None)
            raise

    return wrapper


def refuse_transforms(module: str) -> None:
    """Refuse to run inside torch.func transforms.

    Raises:
        UnsupportedError: called under grad, vmap, jvp or another transform of torch.func.
    """
    if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - torch has no public question
        raise UnsupportedError(
            module,
            got="a transform of torch.func (grad, vmap, jvp, ...)",
            accepted="torch.autograd (backward, torch.autograd.grad), torch.func.functional_call",
            todo="compute gradients with torch.autograd; transforms over te_hal modules are not built yet",
        )
