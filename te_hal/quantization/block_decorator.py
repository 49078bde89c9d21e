"""Blocks that are decorators too: every call of the decorated function runs inside a block of its own."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from te_hal.schema.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Functions that return before their body runs, by what tells them.
_LATE: dict[str, Callable[[object], bool]] = {
    "a generator function": inspect.isgeneratorfunction,
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}


class BlockDecorator:
    """What ``with block(...)`` and ``@block(...)`` share. A decorated function may call itself, and run in threads."""

    def _fresh(self) -> AbstractContextManager[None]:
        """A block with the same settings that nobody has entered."""
        raise NotImplementedError

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """The function, inside a block of these settings in each call.

        Raises:
            ArgumentTypeError: no function, a class, or one that returns before its body runs (a generator function, a
                coroutine function): the block would be left by then.
        """
        got = next((what for what, tells in _LATE.items() if tells(function)), None)
        if got is None and (not callable(function) or isinstance(function, type)):
            got = repr(function)
        if got is not None:
            raise ArgumentTypeError(
                f"@{type(self).__name__}",
                got=got,
                accepted="a function that has run when it returns",
                todo=f"decorate the function that runs the modules, or write 'with {type(self).__name__}(...)' in it",
            )

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._fresh():
                return function(*args, **kwargs)

        return inside
