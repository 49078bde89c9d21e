"""Holds a kernel's signature against its op's schema, so that drift shows at registration and not in training."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from te_hal.schema.errors import RegistrationError
from te_hal.schema.op import REQUIRED

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.op import OpSchema


def check_signature(owner: str, schema: OpSchema, function: Callable[..., object], *, takes_rest: bool = False) -> None:
    """Refuse a function that cannot stand for the op.

    Positional parameters must have the schema's names in the schema's order; keyword-only ones its names in any
    order; all of them its defaults. ``functools.partial`` and wrapped functions count as what
    ``inspect.signature`` makes of them, without parameters of their own that a partial has already bound.

    Args:
        owner: who brings the function, for the message.
        schema: the op.
        function: what is to be registered.
        takes_rest: a ``**`` parameter may stand for the keyword-only ones that are not named.

    Raises:
        RegistrationError: names owner, op and parameter.
    """
    where = f"{owner}: {schema.name}"
    given = _parameters(where, schema, function)
    expected = {name: (keyword_only, default) for name, keyword_only, default in schema.signature}
    if takes_rest and any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in given.values()):
        given = {name: parameter for name, parameter in given.items() if parameter.kind is not parameter.VAR_KEYWORD}
        expected = {name: one for name, one in expected.items() if name in given or not one[0]}
    for name in given:
        if name not in expected:
            raise _refusal(where, schema, f"a parameter {name!r} that the op does not have")
    for name, (keyword_only, default) in expected.items():
        if name not in given:
            raise _refusal(where, schema, f"no parameter {name!r}")
        problem = _difference(given[name], keyword_only=keyword_only, default=default)
        if problem:
            raise _refusal(where, schema, f"parameter {name!r} {problem}")
    wanted = [name for name, (keyword_only, _) in expected.items() if not keyword_only]
    for name, right in zip(_positional(given), wanted, strict=True):
        if name != right:
            raise _refusal(where, schema, f"parameter {name!r} in the place of {right!r}")


def _parameters(where: str, schema: OpSchema, function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise _refusal(where, schema, f"{function!r}, whose signature cannot be read ({error})") from error
    if isinstance(function, functools.partial):
        names = {name for name, _, _ in schema.signature}
        for bound in set(function.keywords) - names:
            parameters.pop(bound, None)
    return parameters


def _positional(parameters: dict[str, inspect.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]


def _difference(parameter: inspect.Parameter, *, keyword_only: bool, default: object) -> str:
    right = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    if parameter.kind is not right:
        return f"{parameter.kind.description} instead of {right.description}"
    if default is REQUIRED:
        return "" if parameter.default is inspect.Parameter.empty else f"with a default ({parameter.default!r})"
    if parameter.default is inspect.Parameter.empty:
        return f"without the default {default!r}"
    same = parameter.default == default and isinstance(parameter.default, bool) == isinstance(default, bool)
    return "" if same else f"with the default {parameter.default!r} instead of {default!r}"


def signature_text(schema: OpSchema) -> str:
    """The op's signature as Python would write it, without annotations."""
    parts = []
    for name, keyword_only, default in schema.signature:
        if keyword_only and "*" not in parts:
            parts.append("*")
        parts.append(name if default is REQUIRED else f"{name}={_literal(default)}")
    return f"{schema.name}({', '.join(parts)})"


def _literal(value: object) -> str:
    return repr(getattr(value, "value", value))


def _refusal(where: str, schema: OpSchema, got: str) -> RegistrationError:
    return RegistrationError(
        where, got=got, accepted=signature_text(schema), todo="give the function exactly these parameters"
    )
