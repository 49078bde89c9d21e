"""Checks of operands that come several at a time, one tensor per group (``Operand.many``)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.op import OpSchema

_SEE_REFERENCE = "see the op's page in docs/ops.md"


def element_of(schema: OpSchema) -> OpSchema:
    """The schema of one group alone. An op that takes several groups has no other operands."""
    operands = tuple(dataclasses.replace(operand, many=False) for operand in schema.operands)
    return dataclasses.replace(schema, operands=operands, flags=(), rules=())


def check_sequence(schema: OpSchema, name: str, value: object) -> None:
    """Refuse what is no list or tuple of at least one thing."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentTypeError(
            f"{schema.name}: {name}",
            got=f"a {type(value).__name__}",
            accepted="a list or tuple of tensors, one per group",
            todo=_SEE_REFERENCE,
        )
    if not value:
        raise ArgumentError(
            f"{schema.name}: {name}", got="no group", accepted="at least one", todo="leave out the call"
        )


def check_groups(schema: OpSchema, check_group: Callable[..., None], given: tuple[Any, ...]) -> None:
    """Refuse operands that are no sequences or not of one length, and every group that is wrong by itself.

    Args:
        schema: the op.
        check_group: of one group's tensors behind the device that all must be on.
        given: the operands in order; None where one is left out.
    """
    first = given[0]
    columns = []
    for operand, value in zip(schema.operands, given, strict=True):
        if value is None and operand.optional:
            columns.append(itertools.repeat(None, len(first)))
            continue
        check_sequence(schema, operand.name, value)
        if len(value) != len(first):
            raise _other_count(schema, operand.name, len(value), len(first))
        columns.append(value)
    device = first[0].device
    index = 0
    try:
        for index, group in enumerate(zip(*columns, strict=True)):  # noqa: B007 - the error says which it was
            check_group(device, *group)
    except (ArgumentError, ArgumentTypeError) as error:
        where = f"{error.where}, group {index}"
        raise type(error)(where, got=error.got, accepted=error.accepted, todo=error.todo) from None


def _other_count(schema: OpSchema, name: str, count: int, wanted: int) -> ArgumentError:
    return ArgumentError(
        f"{schema.name}: {name}",
        got=f"{count} groups",
        accepted=f"{wanted}, as {schema.operands[0].name} has",
        todo="give every operand once per group",
    )
