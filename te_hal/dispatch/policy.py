"""Policy: which ops go elsewhere, who may run them at all, and who may take over what the chosen backend cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from te_hal.schema.errors import ArgumentError

#: In place of an op's name: every op that has no entry of its own.
EVERY_OP = "*"

#: Fields that name backends by op, in the order of a policy file's documentation.
BY_OP = ("order", "allow", "deny", "fallback_per_op")


@dataclass(frozen=True)
class Policy:
    """Exceptions from the choice of one backend. Immutable; the default has none.

    In ``order``, ``allow`` and ``deny`` the op ``"*"`` stands for every op; names alone mean just that.

    Attributes:
        per_op: op name to the backend that runs this op, whichever backend is in force.
        fallback: backends, best first, that may take over a call for which the chosen backend says no before
            launch. An op that raises while it runs is never run again elsewhere.
        order: op name to backends, best first; the first that is usable, serves the tensors' device and is not denied
            is chosen, whichever backend is in force. For ``"*"`` it is asked where none is forced, and before those
            that claim the device.
        allow: op name to the backends that alone may run it. An op's own entry counts instead of that of ``"*"``.
        deny: op name to backends that may not run it, in addition to those of ``"*"``; counts before all else.
        fallback_per_op: op name to backends that count for it instead of ``fallback``; none: no fallback.
    """

    per_op: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    allow: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deny: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fallback_per_op: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_op: object = self.per_op
        if not isinstance(per_op, Mapping) or not _all_text([*per_op, *per_op.values()]):
            raise _refused("per_op", per_op, "a mapping of op names to backend names", "pass a dict")
        names: object = self.fallback
        if not isinstance(names, (tuple, list)) or not _all_text(names):
            raise _refused("fallback", names, "a tuple of backend names, best first", "write ('name',)")
        object.__setattr__(self, "per_op", MappingProxyType(dict(per_op)))
        object.__setattr__(self, "fallback", tuple(names))
        for name in BY_OP:
            object.__setattr__(self, name, _by_op(name, getattr(self, name)))

    def order_of(self, op: str | None) -> tuple[str, ...] | None:
        """The op's own order, without that of ``"*"``; None: it has none."""
        return None if op is None else self.order.get(op)

    def fallback_of(self, op: str) -> tuple[str, ...]:
        """Who may take over calls of an op, best first."""
        return self.fallback_per_op.get(op, self.fallback)

    def bars(self, op: str | None, backend: str) -> str:
        """Why a backend may not run an op, ``"deny"`` or ``"allow"``; empty: it may. None: any op at all."""
        if backend in self.deny.get(EVERY_OP, ()) or (op is not None and backend in self.deny.get(op, ())):
            return "deny"
        allowed = self.allow.get(EVERY_OP) if op is None else self.allow.get(op, self.allow.get(EVERY_OP))
        return "allow" if allowed is not None and backend not in allowed else ""

    def __hash__(self) -> int:
        return hash((self.fallback, *(frozenset(getattr(self, name).items()) for name in ("per_op", *BY_OP))))

    def __reduce__(self) -> tuple[object, ...]:
        values = (getattr(self, each.name) for each in fields(self))
        return (Policy, tuple(dict(value) if isinstance(value, Mapping) else value for value in values))


def _by_op(name: str, given: Any) -> Mapping[str, tuple[str, ...]]:  # noqa: ANN401 - whatever a user passes
    """Names by op as they are kept; refuses what is none."""
    if isinstance(given, (tuple, list)) and name != "fallback_per_op":
        given = {EVERY_OP: given} if given else {}
    right = isinstance(given, Mapping) and all(
        isinstance(op, str) and isinstance(names, (tuple, list)) and _all_text(names) for op, names in given.items()
    )
    if not right:
        raise _refused(name, given, "a mapping of op names to tuples of backend names", "write {'gemm': ('name',)}")
    if name == "fallback_per_op" and EVERY_OP in given:
        raise _refused(name, EVERY_OP, "names of ops; what counts for every op is in fallback", "use fallback=")
    for op, names in given.items():
        if len({*names}) < len(names):
            raise _refused(f"{name} of {op}", names, "each backend once", "remove the repetition")
    return MappingProxyType({op: tuple(names) for op, names in given.items()})


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _refused(name: str, got: object, accepted: str, todo: str) -> ArgumentError:
    return ArgumentError(
        f"Policy: {name}", got=got if isinstance(got, str) else repr(got), accepted=accepted, todo=todo
    )
