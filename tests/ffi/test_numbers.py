"""Numbers at the ends of fp32's range: what an op's rules let through, the kernel library takes (in emulation)."""

from __future__ import annotations

import pytest
import torch
from example_calls import arguments

import te_hal
from te_hal import ops
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.op import FlagType

_LARGEST = torch.finfo(torch.float32).max
EDGES = (float("nan"), -1.0, -1e-60, 0.0, 1e-60, 2.0**-150, 2.0**-149, 448, _LARGEST, _LARGEST * 1.0000001, 1e39)
NUMBERS = (FlagType.FLOAT, FlagType.OPTIONAL_FLOAT, FlagType.FLOATS)
CASES = [
    pytest.param(schema.name, flag, number, id=f"{schema.name}-{flag.name}-{number}")
    for schema in SCHEMAS.values()
    for flag in schema.flags
    if flag.type in NUMBERS
    for number in EDGES
]
_VARIANTS = {"activation": "clamped_swiglu"}


def verdict(backend: str, op: str, flags: dict[str, object]) -> str:
    given = arguments(SCHEMAS[op], _VARIANTS.get(SCHEMAS[op].variant or ""), every_operand=False) | flags
    try:
        with te_hal.use_backend(backend):
            getattr(ops, op)(**given)
    except ArgumentError as error:
        return str(error).split(": got", maxsplit=1)[0]
    return "taken"


@pytest.mark.parametrize(("op", "flag", "number"), CASES)
def test_both_backends_take_a_number_or_both_refuse_it(op, flag, number):
    value = [448.0, number] if flag.type is FlagType.FLOATS else number
    # Numbers of blocks and of current scaling are read where no scale is given.
    flags = {flag.name: value} | ({"scale": None, "mode": "block_1x128"} if flag.name == "amax_epsilon" else {})
    flags = {name: of for name, of in flags.items() if name in _names(op)}
    assert verdict("musa_emulator", op, flags) == verdict("cpu_reference", op, flags)


def _names(op: str) -> set[str]:
    schema = SCHEMAS[op]
    return {operand.name for operand in schema.operands} | {flag.name for flag in schema.flags}
