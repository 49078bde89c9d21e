"""Shape rules: parsing, the message of a broken rule, and the shapes of results."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

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


def output_shape(schema: OpSchema, rule: ShapeRule, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape that a result rule gives for checked arguments."""
    variant = arguments[schema.variant] if schema.variant else None
    text = schema.shape_rule(rule, variant)
    if text == "1":
        return (1,)
    if text[0] == "*":
        return tuple(arguments[text[1:]].shape)
    bound, leading = _bind(schema, arguments, variant)
    dims = parse(text)
    return (leading if dims.leading else ()) + tuple(factor * bound[symbol] for factor, symbol in dims.sizes)


def _bind(schema: OpSchema, arguments: Mapping[str, Any], variant: object) -> tuple[dict[str, int], tuple[int, ...]]:
    bound: dict[str, int] = {}
    leading: tuple[int, ...] = ()
    for operand in schema.operands:
        text = schema.shape_rule(operand.shape, variant)
        if arguments[operand.name] is None or text[0] in "1*<":
            continue
        dims = parse(text)
        shape = tuple(arguments[operand.name].shape)
        split = len(shape) - len(dims.sizes)
        if dims.leading:
            leading = shape[:split]
        for (factor, symbol), size in zip(dims.sizes, shape[split:], strict=True):
            bound.setdefault(symbol, size // factor)
    return bound, leading


def output_dtype(dtype: torch.dtype | str, arguments: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a result rule gives: the first of its names that is not None."""
    if isinstance(dtype, torch.dtype):
        return dtype
    for name in dtype.split("|"):
        value = arguments[name]
        if value is not None:
            found: torch.dtype = value if isinstance(value, torch.dtype) else value.dtype
            return found
    msg = f"no dtype for a result that follows {dtype!r}"
    raise ValueError(msg)
