"""Asks a factory of CustomRecipe about every tensor of a module, and checks all its answers together."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization.quantizer import Quantizer
from te_hal.quantization.quantizer_request import DelayedScalingRequest, QuantizerRequest
from te_hal.quantization.unquantized import PythonQuantizer
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.quantization.quantizer_role import SlotRoles

    Answer = Quantizer | DelayedScalingRequest

_METHODS = ("quantize", "dequantize")
#: How far a snapshot follows what a factory refers to.
_DEPTH = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def ask_factory(
    qfactory: Callable[[Any], Any], roles: Mapping[str, SlotRoles], label: str
) -> dict[str, tuple[Answer, ...]]:
    """The factory's answers per direction, in slot order; an object with just two methods as a PythonQuantizer.

    Args:
        qfactory: asked once per slot, forward before backward.
        roles: of the slots.
        label: the module's, for messages.

    Raises:
        ArgumentError: answers that are None, unknown requests, or objects without the methods, all of them in one
            message; requests for delayed scaling that differ from each other.
    """
    given = {key: tuple(qfactory(role) for role in of_slots) for key, of_slots in roles.items()}
    wrong = [
        f"for {key} slot {slot} ({roles[key][slot]}) {lack}"
        for key, answers in given.items()
        for slot, answer in enumerate(answers)
        if (lack := _lack(answer))
    ]
    if wrong:
        raise ArgumentError(
            f"{label}: CustomRecipe.qfactory",
            got="; ".join(wrong),
            accepted="a te.Quantizer, a te.DelayedScalingRequest, or an object with quantize and dequantize",
            todo="return te.IdentityQuantizer() for what shall stay unquantized; the role is None for a result whose"
            " consumer is not known",
        )
    requests = {answer for answers in given.values() for answer in answers if isinstance(answer, DelayedScalingRequest)}
    if len(requests) > 1:
        raise ArgumentError(
            f"{label}: CustomRecipe.qfactory",
            got=f"{len(requests)} different requests: {', '.join(sorted(map(repr, requests)))}",
            accepted="equal DelayedScalingRequests within a module, which keeps one state for them",
            todo="make one request and return it for every role",
        )
    return {key: tuple(map(_as_answer, answers)) for key, answers in given.items()}


def _lack(answer: object) -> str:
    """What is wrong with an answer; nothing: an empty text."""
    if answer is None:
        return "None"
    if isinstance(answer, (Quantizer, DelayedScalingRequest)):
        return ""
    name = type(answer).__name__
    if isinstance(answer, QuantizerRequest):
        return f"a {name}, a request that no module serves"
    if getattr(answer, "custom", False):
        return f"a {name} that says it multiplies by a qgemm of its own, which modules do not call"
    if isinstance(answer, type):
        return f"the class {answer.__name__} in place of an object"
    missing = [method for method in _METHODS if not callable(getattr(answer, method, None))]
    return f"a {name} without {' and '.join(missing)}" if missing else ""


def _as_answer(answer: Any) -> Answer:  # noqa: ANN401 - checked
    return answer if isinstance(answer, (Quantizer, DelayedScalingRequest)) else PythonQuantizer(answer)


def same_answers(one: Sequence[Answer], other: Sequence[Answer]) -> bool:
    """Whether two lists of answers quantize alike: the same classes with the same settings, and the same tensors."""
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(one: object, other: object) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, Quantizer) or not _has_equality(one):
        mine, others = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
        if mine is None or others is None or mine.keys() != others.keys():
            return False
        return all(_alike(mine[name], others[name]) for name in mine)
    return bool(one == other)


def _has_equality(value: object) -> bool:
    """Whether ``==`` of its class says more than identity, and gives a bool."""
    return isinstance(value, (*_PLAIN, dict, list, tuple, enum.Enum, torch.dtype)) or (
        type(value).__eq__ is not object.__eq__ and dataclasses.is_dataclass(value)
    )


def factory_snapshot(qfactory: object) -> tuple[object, ...]:
    """What a factory's answers may depend on besides the role, to be compared with a later one.

    Covers the variables of its closure, its defaults, the globals its code names, the arguments of a
    functools.partial, and the attributes of the factory where it is an object; numbers, texts and containers of them
    count by value, functions by what they refer to in turn, other objects by identity. What it reads elsewhere is not
    seen.
    """
    return _snapshot(qfactory, _DEPTH)


def _snapshot(value: object, depth: int) -> tuple[object, ...]:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if depth == 0:
        return (_Same(value),)
    if isinstance(value, dict):
        return (dict, *(_snapshot(part, depth - 1) for item in value.items() for part in item))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), *(_snapshot(part, depth - 1) for part in value))
    return (_Same(value), *(_snapshot(part, depth - 1) for part in _refers_to(value, depth)))


def _refers_to(value: object, depth: int) -> tuple[object, ...]:
    """What calling an object may read; of objects that are not the factory itself nothing."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__.__dict__ if hasattr(value.__self__, "__dict__") else None
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        return cells, value.__defaults__, value.__kwdefaults__, named
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if depth == _DEPTH and hasattr(value, "__dict__"):
        return (value.__dict__,)
    return ()


class _Same:
    """Compares an object by identity, and keeps it alive so that no other takes its place in memory."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment] # compared, never looked up


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
