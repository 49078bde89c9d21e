"""Shapes that a case may have: by the symbols of an op's shape rules, and the shape of every operand that follows."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from te_hal.schema.nvfp4_layout import BLOCK
from te_hal.schema.shapes import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.op import OpSchema

_SCALAR = "scalar"
#: Written as sizes joined by "x": leading ones first, then one per symbol. The first is the everyday one. Off a tile,
#: a tile, one element, empty in each place, several tiles and a bit.
_NO_SYMBOL = (
    *("24x40", _SCALAR, "1", "129", "13x37", "3x5x7", "130x264", "128x128", "0x16", "16x0", "1x1000"),
    "2x24x80",
)
_SHAPES: dict[tuple[bool, int], tuple[str, ...]] = {
    (True, 0): _NO_SYMBOL,
    (True, 1): ("24x40", "7", "1x1", "13x37", "3x5x24", "130x264", "0x16", "16x1", "5x1000", "64x128", "2x24x80"),
    (True, 2): ("2x3x24x40", "1x1", "8x8", "13x37", "2x16x16", "0x8", "3x1x40", "1x40x1", "2x5x257", "2x0x8x8"),
    (False, 1): ("64", "1", "37", "0", "1000"),
    (False, 2): ("24x40", "1x1", "8x8", "13x37", "130x264", "0x16", "16x0", "1x40", "40x1", "300x33", "48x80"),
    (False, 3): (
        *("16x32x24", "1x1x1", "13x37x29", "8x16x24", "33x1x17", "1x64x1", "0x16x16", "16x0x16"),
        *("16x16x0", "128x128x128", "130x264x72", "48x80x144"),
    ),
}


def shapes_of(schema: OpSchema) -> tuple[str, ...]:
    """The shapes that an op is tried with.

    Raises:
        KeyError: an op with more kinds of sizes than there are shapes for.
    """
    leading, symbols = _symbols(schema, _first_variant(schema))
    return _SHAPES[leading, len(symbols)]


def in_whole_blocks(shape: str) -> bool:
    """Whether NVFP4's blocks divide ``[M, K]`` of that shape in both directions."""
    sizes = [int(size) for size in shape.split("x") if size != "scalar"]
    return len(sizes) > 1 and sizes[-1] % BLOCK == 0 and math.prod(sizes[:-1]) % BLOCK == 0


def operand_shapes(schema: OpSchema, shape: str, variant: object) -> dict[str, tuple[int, ...]]:
    """The shape of each operand. A mask's is one that broadcasts: the last two dimensions of the operand's.

    Args:
        schema: the op.
        shape: as :func:`shapes_of` gives it.
        variant: value of the op's variant flag; None without one.

    Raises:
        ValueError: another number of sizes than the op has symbols.
    """
    sizes = () if shape == _SCALAR else tuple(int(size) for size in shape.split("x"))
    _, symbols = _symbols(schema, variant)
    count = len(sizes) - len(symbols)
    if count < 0:
        msg = f"shape {shape!r} of {schema.name}: sizes for {', '.join(symbols)} are due"
        raise ValueError(msg)
    leading, known = sizes[:count], dict(zip(symbols, sizes[count:], strict=True))
    found: dict[str, tuple[int, ...]] = {}
    for operand in schema.operands:
        rule = schema.shape_rule(operand.shape, variant)
        if rule == "1":
            found[operand.name] = (1,)
        elif rule[0] == "*":
            found[operand.name] = found[rule[1:]]
        elif rule[0] == "<":
            found[operand.name] = found[rule[1:]][-2:]
        else:
            dims = parse(rule)
            found[operand.name] = (leading if dims.leading else ()) + tuple(f * known[s] for f, s in dims.sizes)
    return found


def shape_word(schema: OpSchema, shapes: Mapping[str, tuple[int, ...]], variant: object) -> str:
    """The shape of a case, as :func:`operand_shapes` reads it, from the shapes of a call's operands.

    Args:
        schema: the op.
        shapes: by operand, without those that are left out.
        variant: value of the op's variant flag; None without one.
    """
    _, symbols = _symbols(schema, variant)
    leading: tuple[int, ...] = ()
    known: dict[str, int] = {}
    for operand in schema.operands:
        rule = schema.shape_rule(operand.shape, variant)
        if operand.name not in shapes or rule[0] in "1*<":
            continue
        dims, shape = parse(rule), shapes[operand.name]
        count = len(shape) - len(dims.sizes)
        leading = shape[:count] if dims.leading else leading
        known |= {symbol: size // factor for (factor, symbol), size in zip(dims.sizes, shape[count:], strict=True)}
    sizes = (*leading, *(known[symbol] for symbol in symbols))
    return "x".join(map(str, sizes)) or _SCALAR


def is_shape(schema: OpSchema, word: str) -> bool:
    """Whether a word is a shape that the op's operands may have, among those that it is tried with or not."""
    if not re.fullmatch(rf"{_SCALAR}|\d+(x\d+)*", word):
        return False
    leading, symbols = _symbols(schema, _first_variant(schema))
    count = 0 if word == _SCALAR else word.count("x") + 1
    return count >= len(symbols) if leading or not symbols else count == len(symbols)


def _first_variant(schema: OpSchema) -> object:
    flag = next((flag for flag in schema.flags if flag.name == schema.variant), None)
    return None if flag is None else flag.choices[0]


def _symbols(schema: OpSchema, variant: object) -> tuple[bool, list[str]]:
    """Whether the op has leading dimensions, and its symbols in order of appearance."""
    leading, symbols = False, dict[str, None]()
    for operand in schema.operands:
        rule = schema.shape_rule(operand.shape, variant)
        if rule[0] in "1*<":
            continue
        dims = parse(rule)
        leading = leading or dims.leading
        symbols.update(dict.fromkeys(symbol for _, symbol in dims.sizes))
    return leading, list(symbols)
