"""Composition: how an optional op is made of others, and its kernel for one described call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from te_hal.schema.support import Call

    Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Composition:
    """What :func:`te_hal.dispatch.register_composition` was given.

    Attributes:
        function: the composition, in plain torch; with ``parts``, behind a first parameter for their kernels.
        parts: the calls that a described call is made of, by name; None where it is plain torch alone.
    """

    function: Kernel
    parts: Callable[[Call], Mapping[str, Call]] | None = None

    def bind(self, call: Call, resolve: Callable[[Call], Kernel]) -> Kernel:
        """The kernel of a described call: every part is resolved now, and stays what it is.

        Args:
            call: of the composed op.
            resolve: gives the kernel of a part.

        Raises:
            UnsupportedError: nobody has one of the parts.
        """
        if self.parts is None:
            return self.function
        kernels = {name: resolve(part) for name, part in self.parts(call).items()}
        return functools.partial(self.function, SimpleNamespace(**kernels))
