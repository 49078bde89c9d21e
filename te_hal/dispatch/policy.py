"""Policy: which ops go elsewhere, and who may take over what the chosen backend cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from te_hal.dispatch import listing, registry
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True)
class Policy:
    """Exceptions from the choice of one backend. Immutable; the default has none.

    Attributes:
        per_op: op name to the backend that runs this op, whichever backend is in force.
        fallback: backends, best first, that may take over a call for which the chosen backend says no before
            launch. An op that raises while it runs is never run again elsewhere.
    """

    per_op: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        per_op: object = self.per_op
        if not isinstance(per_op, Mapping) or not _all_text([*per_op, *per_op.values()]):
            raise ArgumentError(
                "Policy: per_op",
                got=repr(per_op),
                accepted="a mapping of op names to backend names",
                todo="pass a dict",
            )
        names: object = self.fallback
        if not isinstance(names, (tuple, list)) or not _all_text(names):
            raise ArgumentError(
                "Policy: fallback",
                got=repr(names),
                accepted="a tuple of backend names, best first",
                todo="write ('name',)",
            )
        object.__setattr__(self, "per_op", MappingProxyType(dict(per_op)))
        object.__setattr__(self, "fallback", tuple(names))

    def __hash__(self) -> int:
        return hash((frozenset(self.per_op.items()), self.fallback))

    def __reduce__(self) -> tuple[object, ...]:
        return (Policy, (dict(self.per_op), self.fallback))


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def check_names(policy: Policy, where: str) -> None:
    """Refuse names that nobody knows.

    Raises:
        ArgumentError: an op that does not exist.
        BackendNotFoundError: a backend that does not exist.
    """
    for op in policy.per_op:
        if op not in SCHEMAS:
            raise ArgumentError(
                f"{where}: per_op", got=f"op {op!r}", accepted=", ".join(SCHEMAS), todo="correct the name"
            )
    for name in (*policy.per_op.values(), *policy.fallback):
        if name not in registry.tables().failures:
            listing.find(name, where)


def check_usable(policy: Policy, where: str) -> None:
    """Refuse a policy that sends an op to a backend that cannot run it; a fallback may be unusable here.

    Raises:
        ArgumentError, BackendNotFoundError: as :func:`check_names`.
        BackendUnavailableError: an op's backend cannot be used on this machine.
        UnsupportedError: an op's backend has no kernel for it.
    """
    check_names(policy, where)
    for op, name in policy.per_op.items():
        backend = listing.find_usable(name, where)
        if op not in backend.kernels:
            raise UnsupportedError(
                f"{where}: per_op",
                got=f"{op!r} sent to backend {name!r}, which has no kernel for it",
                accepted=f"one of its ops: {', '.join(sorted(backend.kernels)) or 'none'}",
                todo="leave the op out, or name another backend",
            )
