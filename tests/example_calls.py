"""A right call of every op, made from its schema: the starting point of tests that then break one thing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import ColumnwiseOrder, ScalingMode, element_format
from te_hal.schema.op import REQUIRED, Operand, OpSchema
from te_hal.schema.storage import QuantizedStorage

SIZES = {"M": 4, "K": 6, "N": 5, "H": 7, "F": 3, "L": 2, "Sq": 4, "Sk": 9}
LEADING = (2, 3)

# Flags without a default; a variant flag is chosen by the caller.
REQUIRED_FLAGS = {"activation": "gelu", "dtype": torch.float8_e4m3fn, "fp8_max": 448.0, "fp8_maxima": [448.0, 57344.0]}
# Optional operands that the plainest right call has.
NEEDED = {("quantize", "scale")}
# Optional operands that go with some values of the variant flag only.
ONLY_WITH = {("gemm", "bias"): "fprop"}


def variants(schema: OpSchema) -> tuple[Any, ...]:
    """The values of the flag that chooses among shape rules; (None,) where there is none."""
    if schema.variant is None:
        return (None,)
    return next(flag.choices for flag in schema.flags if flag.name == schema.variant)


ALL_CALLS = [(schema, variant) for schema in SCHEMAS.values() for variant in variants(schema)]


def call_id(value: object) -> str:
    """`gemm`, `fprop`: the parts of a parametrized test's name."""
    return value.name if isinstance(value, (OpSchema, Operand)) else str(value)


def shape_of(schema: OpSchema, operand: Operand, variant: object) -> tuple[int, ...]:
    """The sizes that SIZES and LEADING give the operand's rule."""
    rule = operand.shape if isinstance(operand.shape, str) else operand.shape[str(variant)]
    if rule == "1":
        return (1,)
    if rule[0] in "*<":
        other = next(o for o in schema.operands if o.name == rule[1:])
        return shape_of(schema, other, variant)
    shape: tuple[int, ...] = ()
    for token in rule.split():
        factor, symbol = re.fullmatch(r"(\d*)(.*)", token).groups()  # type: ignore[union-attr]
        shape += LEADING if symbol == "..." else (int(factor or 1) * SIZES[symbol],)
    return shape


def tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Ones, so that a test which runs a real kernel stays finite."""
    return torch.ones(shape, dtype=dtype, device=device)


def storage(shape: tuple[int, ...], dtype: torch.dtype = torch.float8_e4m3fn, device: str = "cpu") -> QuantizedStorage:
    """A rowwise per-tensor storage of zeros."""
    return QuantizedStorage(
        format=element_format(dtype),
        mode=ScalingMode.TENSOR,
        shape=shape,
        dtype=torch.float32,
        rowwise_data=torch.zeros(shape, dtype=torch.uint8, device=device),
        rowwise_scale_inv=torch.ones(1, device=device),
        columnwise_order=ColumnwiseOrder.TRANSPOSED,
    )


def operand_value(schema: OpSchema, operand: Operand, variant: object, device: str = "cpu") -> Any:
    """What the operand takes: a tensor of its first dtype, or a storage where it takes no tensor; two of several."""
    if operand.many:
        return [operand_value(schema, replace(operand, many=False), variant, device) for _ in range(2)]
    shape = shape_of(schema, operand, variant)
    if operand.dtypes:
        return tensor(shape, operand.dtypes[0], device)
    return storage(shape, device=device)


def arguments(
    schema: OpSchema, variant: object = None, *, every_operand: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Every argument of a right call by name.

    Args:
        schema: the op.
        variant: value of its variant flag.
        every_operand: give the optional operands too, those that the variant allows.
        device: where the operands lie.
    """
    given: dict[str, Any] = {}
    for operand in schema.operands:
        key = (schema.name, operand.name)
        allowed = ONLY_WITH.get(key, variant) == variant
        wanted = not operand.optional or key in NEEDED or (every_operand and allowed)
        given[operand.name] = operand_value(schema, operand, variant, device) if wanted else None
    for flag in schema.flags:
        if flag.name == schema.variant:
            given[flag.name] = variant
        else:
            given[flag.name] = REQUIRED_FLAGS[flag.name] if flag.default is REQUIRED else flag.default
    return given
