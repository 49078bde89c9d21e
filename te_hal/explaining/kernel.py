"""What a kernel is called: the function behind wrappers and bound arguments."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def kernel_name(kernel: Callable[..., Any]) -> str:
    """Module and name of the function that a kernel comes down to, as in ``te_hal.backends.null.kernels.amax``."""
    function: Any = kernel
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    owner = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{owner}.{name}" if owner else str(name)
