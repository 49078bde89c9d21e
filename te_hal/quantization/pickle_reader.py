"""Reads a pickle of plain containers and listed names without running it: nothing is imported, called or built.

A pickle is a program for a stack machine. This machine knows the instructions that saved states consist of and turns
every reference to a class or function into a :class:`Name` and every call into a :class:`Made`, which only record
what was asked for. Any other instruction, and any name that the caller has not listed, ends the reading.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: More than any real state has (about 200 an FP8 module); each costs a little memory at most.
_MOST_INSTRUCTIONS = 100_000
_NEWEST_PROTOCOL = 5


class UnreadablePickleError(ValueError):
    """The bytes are no pickle that this reader takes; the message says what was met."""


@dataclass(frozen=True, slots=True)
class Name:
    """A reference to something importable, as text."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(slots=True, eq=False)
class Made:
    """What a call would have made: never called.

    Attributes:
        of: the class or function.
        arguments: as recorded; inert values themselves.
        state: what would have been set on the result; None if nothing.
    """

    of: Name
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class Persistent:
    """A reference to something outside the pickle, such as a tensor's memory."""

    identity: tuple[Any, ...]


def read_pickle(data: bytes, names: Collection[Name], start: int = 0) -> tuple[Any, int]:
    """The inert value of one pickle, and where the next byte after it stands.

    Args:
        data: bytes that hold it.
        names: that may be referred to.
        start: where it begins.

    Raises:
        UnreadablePickleError: cut short, damaged, too long, an instruction or a name that is not known.
    """
    stream = io.BytesIO(data)
    stream.seek(start)
    machine = _Machine(names)
    try:
        machine.run(stream)
    except UnreadablePickleError:
        raise
    except (ValueError, OverflowError) as error:
        raise UnreadablePickleError(str(error)) from error
    if len(machine.stack) != 1:
        raise UnreadablePickleError(f"{len(machine.stack)} values where one is due")
    return machine.stack[0], stream.tell()


class _Machine:
    def __init__(self, names: Collection[Name]) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.names = names

    def run(self, stream: io.BytesIO) -> None:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= _MOST_INSTRUCTIONS:
                raise UnreadablePickleError(f"more than {_MOST_INSTRUCTIONS} instructions")
            step = _STEPS.get(opcode.name)
            if step is None:
                raise UnreadablePickleError(f"instruction {opcode.name}")
            step(self, argument)

    def push(self, value: Any) -> None:  # noqa: ANN401 - any inert value
        self.stack.append(value)

    def top(self) -> Any:  # noqa: ANN401
        # A mark is the bottom of what may be taken.
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise UnreadablePickleError("an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:  # noqa: ANN401
        value = self.top()
        self.stack.pop()
        return value

    def pop_several(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def pop_marked(self) -> list[Any]:
        if not self.marks:
            raise UnreadablePickleError("no mark")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def memoize(self, _argument: object) -> None:
        self.memo[len(self.memo)] = self.top()

    def put(self, index: int) -> None:
        self.memo[index] = self.top()

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise UnreadablePickleError(f"nothing remembered under {index}")
        self.push(self.memo[index])

    def refer(self, argument: str | None) -> None:
        """GLOBAL has both names in its argument, STACK_GLOBAL on the stack."""
        module, attribute = self.pop_several(2) if argument is None else argument.split(" ", 1)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise UnreadablePickleError("a name that is no text")
        name = Name("builtins" if module == "__builtin__" else module, attribute)
        if name not in self.names:
            raise UnreadablePickleError(f"a reference to {name}")
        self.push(name)

    def make(self, _argument: object) -> None:
        of, arguments = self.pop_several(2)
        if not isinstance(of, Name) or not isinstance(arguments, tuple):
            raise UnreadablePickleError("a call of something that has no name")
        self.push(Made(of, arguments))

    def build(self, _argument: object) -> None:
        state, made = self.pop(), self.top()
        if not isinstance(made, Made) or made.state is not None:
            raise UnreadablePickleError("a state for something that takes none")
        made.state = state

    def persist(self, _argument: object) -> None:
        identity = self.pop()
        if not isinstance(identity, tuple):
            raise UnreadablePickleError("a reference to memory that is no tuple")
        self.push(Persistent(identity))

    def append(self, values: list[Any]) -> None:
        into = self.top()
        if not isinstance(into, list):
            raise UnreadablePickleError("items for something that is no list")
        into.extend(values)

    def set_items(self, values: list[Any]) -> None:
        into, (keys, items) = self.top(), (values[::2], values[1::2])
        if not isinstance(into, dict) or len(keys) != len(items):
            raise UnreadablePickleError("pairs for something that is no dict")
        if not all(isinstance(key, (str, int)) for key in keys):
            raise UnreadablePickleError("a key that is neither text nor number")
        into.update(zip(keys, items, strict=True))


def _nothing(_machine: _Machine, _argument: object) -> None:
    """Nothing to do: a frame only says how long it is, STOP ends the iteration itself."""


def _check_protocol(_machine: _Machine, protocol: int) -> None:
    if protocol > _NEWEST_PROTOCOL:
        raise UnreadablePickleError(f"pickle protocol {protocol}")


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(machine.pop_several(count))


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _check_protocol,
    "FRAME": _nothing,
    "STOP": _nothing,
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
            *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        ),
        _Machine.push,
    ),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_marked())),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_marked()),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.pop_several(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_marked()),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine.refer),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.make),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persist,
}
