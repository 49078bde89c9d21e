"""Shape rules: parsing, the message of a broken rule, and the shapes and dtypes of results as Python text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import Operand, OpSchema, ShapeRule

_TOKEN = re.compile(r"^(\d*)([A-Z][A-Za-z]*)$")


@dataclass(frozen=True, slots=True)
class Dims:
    """A parsed rule of symbols. ``sizes`` holds (factor, symbol) per trailing dimension."""

    leading: bool
    sizes: tuple[tuple[int, str], ...]


@functools.cache
def parse(rule: str) -> Dims:
    """Parse a rule of symbols such as ``"... 2F"``; the special rules ``1``, ``*x``, ``<x`` are not parsed here.

    Raises:
        ValueError: a token is neither ``...`` in front nor an optional factor and a symbol.
    """
    tokens = rule.split()
    leading = bool(tokens) and tokens[0] == "..."
    sizes = []
    for token in tokens[leading:]:
        match = _TOKEN.match(token)
        if match is None:
            msg = f"shape rule {rule!r}: cannot read {token!r}"
            raise ValueError(msg)
        sizes.append((int(match[1] or 1), match[2]))
    return Dims(leading, tuple(sizes))


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether ``shape`` broadcasts to ``target`` without changing it."""
    if len(shape) > len(target):
        return False
    return all(s in (1, t) for s, t in zip(reversed(shape), reversed(target), strict=False))


def shape_error(schema: OpSchema, operand: Operand, arguments: Mapping[str, Any]) -> ArgumentError:
    """The error for an operand whose shape breaks its rule; names every operand's shape and rule."""
    variant = arguments[schema.variant] if schema.variant else None

    def line(other: Operand) -> str:
        return f"{other.name} {_say(schema.shape_rule(other.shape, variant))}"

    given = [o for o in schema.operands if arguments[o.name] is not None]
    where = schema.name if variant is None else f"{schema.name}({schema.variant}={variant!r})"
    return ArgumentError(
        f"{where}: {operand.name}",
        got=", ".join(f"{o.name} {tuple(arguments[o.name].shape)}" for o in given),
        accepted=", ".join(line(o) for o in given),
        todo="reshape or pad the operand named first",
    )


def _say(rule: str) -> str:
    if rule == "1":
        return "of one element"
    if rule[0] == "*":
        return f"of {rule[1:]}'s shape"
    if rule[0] == "<":
        return f"broadcasting to {rule[1:]}"
    return f"[{', '.join(rule.split())}]"


def shape_source(schema: OpSchema, rule: ShapeRule, variant: object) -> str:
    """A Python expression over the op's arguments: the shape that a result rule gives, a tuple, for a checked call.

    Args:
        schema: the op.
        rule: the result's.
        variant: value of the op's variant flag; None without one.
    """
    text = schema.shape_rule(rule, variant)
    if text == "1":
        return "(1,)"
    if text[0] == "*":
        return f"tuple({text[1:]}.shape)"
    leading, sizes = _sources(schema, variant)
    dims = parse(text)
    parts = [sizes[symbol] if factor == 1 else f"{factor} * ({sizes[symbol]})" for factor, symbol in dims.sizes]
    return " + ".join([leading] * dims.leading + [f"({', '.join(parts)},)"] * bool(parts))


def _sources(schema: OpSchema, variant: object) -> tuple[str, dict[str, str]]:
    """Where the leading sizes and each symbol are read from: the first operand that must be given and has them."""
    leading = "()"
    sizes: dict[str, str] = {}
    for operand in schema.operands:
        text = schema.shape_rule(operand.shape, variant)
        if operand.optional or text[0] in "1*<":
            continue
        dims = parse(text)
        count = len(dims.sizes)
        if dims.leading and leading == "()":
            leading = f"tuple({operand.name}.shape{f'[:-{count}]' if count else ''})"
        for index, (factor, symbol) in enumerate(dims.sizes):
            size = f"{operand.name}.shape[{index - count}]"
            sizes.setdefault(symbol, size if factor == 1 else f"{size} // {factor}")
    return leading, sizes


def dtype_source(schema: OpSchema, dtype: str) -> str:
    """A Python expression over the op's arguments: the dtype of a result that follows the names in ``dtype``."""
    operands = {operand.name: operand for operand in schema.operands}
    *others, last = dtype.split("|")
    source = f"{last}.dtype" if last in operands else last
    for name in reversed(others):
        source = f"{name}{'.dtype' if name in operands else ''} if {name} is not None else {source}"
    return source
