"""A policy as it is written: in a TOML file, and in the environment's variables.

A file has a table per op, ``"*"`` for every op; ``docs/backends.md`` shows one::

    ["*"]
    fallback = ["cpu_reference"]

    [rmsnorm_fwd]
    deny = ["mychip"]
"""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_hal.dispatch.policy import EVERY_OP, Policy
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.environment import ENVIRONMENT
from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    ByOp = dict[str, dict[str, Any]]

#: What a table may have: a backend's name, or a list of such names.
_LISTS = ("order", "allow", "deny", "fallback")
_ONE = "backend"


def read_policy(path: Path | str) -> Policy:
    """The policy in a TOML file.

    Args:
        path: a table per op (or ``"*"``), with ``backend = "name"`` (as ``per_op``) or lists of names under
            ``order``, ``allow``, ``deny`` and ``fallback``. Backends are looked up when the policy is put in force.

    Raises:
        ArgumentError: cannot be read, is no TOML, or has a table, a key or a value that means nothing here.
        UnsupportedError: this Python is older than 3.11 and tomli is not installed.
    """
    return _policy(_checked(_load(Path(path)), str(path)), str(path))


@functools.cache
def start_policy() -> tuple[Policy, str]:
    """What the environment asks for, and the variables that do.

    Each of TE_HAL_ORDER, TE_HAL_ALLOW, TE_HAL_DENY and TE_HAL_FALLBACK counts, for the ops that it names, instead of
    what the file in TE_HAL_POLICY says of the same.

    Raises:
        ArgumentError, UnsupportedError: as :func:`read_policy`; an op that does not exist, or a contradiction.
    """
    by_op: ByOp = {}
    if ENVIRONMENT.policy is not None:
        where = f"TE_HAL_POLICY ({ENVIRONMENT.policy})"
        by_op = _checked(_load(Path(ENVIRONMENT.policy), where), where)
    said = [] if ENVIRONMENT.policy is None else ["TE_HAL_POLICY"]
    for key in _LISTS:
        named: Mapping[str, tuple[str, ...]] = getattr(ENVIRONMENT, key)
        variable = f"TE_HAL_{key.upper()}"
        said += [variable] if named else []
        for op, names in named.items():
            _check_op(op, variable)
            by_op.setdefault(op, {})[key] = names
    where = ", ".join(said) or "TE_HAL_POLICY"
    return _policy(by_op, where), where


def _load(path: Path, where: str = "") -> dict[str, Any]:
    try:
        toml: Any = import_module("tomllib")
    except ModuleNotFoundError:
        toml = _tomli(path)
    try:
        with path.open("rb") as file:
            found: dict[str, Any] = toml.load(file)
    except OSError as error:
        raise _refused(where or str(path), f"a file that cannot be read ({error.strerror})") from None
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _refused(where or str(path), f"no TOML ({error})") from None
    return found


def _tomli(path: Path) -> Any:  # noqa: ANN401 - a module
    try:
        return import_module("tomli")
    except ModuleNotFoundError:
        raise UnsupportedError(
            str(path),
            got="a policy in TOML, without a reader of it",
            accepted="Python 3.11 or newer, or the package tomli",
            todo="pip install tomli, or use TE_HAL_ORDER, TE_HAL_ALLOW, TE_HAL_DENY and TE_HAL_FALLBACK",
        ) from None


def _checked(content: dict[str, Any], where: str) -> ByOp:
    for op, table in content.items():
        if not isinstance(table, dict):
            raise _refused(f"{where}: {op}", f"{table!r} outside of a table", "write it below [op]")
        _check_op(op, where)
        for key, value in table.items():
            _check_value(key, value, f"{where}: [{op}]")
        if op == EVERY_OP and _ONE in table:
            raise _refused(f"{where}: [{op}]", _ONE, "use order, or TE_HAL_BACKEND, for every op")
    return content


def _check_op(op: str, where: str) -> None:
    if op not in SCHEMAS and op != EVERY_OP:
        accepted = f"{EVERY_OP} or one of {', '.join(SCHEMAS)}"
        raise ArgumentError(where, got=f"op {op!r}", accepted=accepted, todo="correct the name")


def _check_value(key: str, value: object, where: str) -> None:
    if key == _ONE:
        right, accepted = isinstance(value, str), "a backend's name"
    elif key in _LISTS:
        right = isinstance(value, list) and all(isinstance(name, str) for name in value)
        accepted = "a list of backends' names"
    else:
        raise ArgumentError(where, got=repr(key), accepted=", ".join((_ONE, *_LISTS)), todo="correct the key")
    if not right:
        raise ArgumentError(f"{where} {key}", got=repr(value), accepted=accepted, todo="correct the value")


def _policy(by_op: ByOp, where: str) -> Policy:
    """The policy; an error names where it is from."""
    lists = {key: {op: tuple(table[key]) for op, table in by_op.items() if key in table} for key in _LISTS}
    fallback = lists.pop("fallback")
    try:
        return Policy(
            per_op={op: table[_ONE] for op, table in by_op.items() if _ONE in table},
            fallback=fallback.pop(EVERY_OP, ()),
            fallback_per_op=fallback,
            **lists,
        )
    except ArgumentError as error:
        raise ArgumentError(
            f"{where}: {error.where}", got=error.got, accepted=error.accepted, todo=error.todo
        ) from None


def _refused(where: str, got: str, todo: str = "see docs/backends.md, Policy") -> ArgumentError:
    return ArgumentError(where, got=got, accepted="a table per op, each with keys and lists of backends", todo=todo)
