"""Holds a policy against what exists: its ops, its backends, and whether these can do what it sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.dispatch import listing, registry
from te_hal.dispatch.policy import BY_OP, EVERY_OP
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.dispatch.policy import Policy


def check_names(policy: Policy, where: str) -> None:
    """Refuse names that nobody knows.

    Raises:
        ArgumentError: an op that does not exist.
        BackendNotFoundError: a backend that does not exist.
    """
    for field, op, names in _entries(policy):
        if op not in SCHEMAS and op != EVERY_OP:
            raise ArgumentError(
                f"{where}: {field}", got=f"op {op!r}", accepted=", ".join(SCHEMAS), todo="correct the name"
            )
        for name in names:
            if name not in registry.tables().failures:
                listing.find(name, f"{where}: {field}")


def _entries(policy: Policy) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Field, op and backends of every entry."""
    yield "fallback", EVERY_OP, policy.fallback
    for op, name in policy.per_op.items():
        if op == EVERY_OP:
            raise ArgumentError(
                "Policy: per_op", got=repr(op), accepted="names of ops", todo="use te_hal.set_backend, or order="
            )
        yield "per_op", op, (name,)
    for field in BY_OP:
        for op, names in getattr(policy, field).items():
            yield field, op, names


def check_usable(policy: Policy, where: str) -> None:
    """Refuse a policy that sends an op to a backend that cannot run it; those of the lists may be unusable here.

    Raises:
        ArgumentError, BackendNotFoundError: as :func:`check_names`.
        BackendUnavailableError: an op's backend cannot be used on this machine.
        UnsupportedError: an op's backend has no kernel for it, or may not run it.
    """
    check_names(policy, where)
    for op, name in policy.per_op.items():
        backend = listing.find_usable(name, where)
        barred = policy.bars(op, name)
        if op in backend.kernels and not barred:
            continue
        why = f"which the policy's {barred} keeps from it" if barred else "which has no kernel for it"
        ops = sorted(each for each in backend.kernels if not policy.bars(each, name))
        raise UnsupportedError(
            f"{where}: per_op",
            got=f"{op!r} sent to backend {name!r}, {why}",
            accepted=f"one of its ops: {', '.join(ops) or 'none'}",
            todo="leave the op out, or name another backend",
        )
