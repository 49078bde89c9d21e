"""Every op of the interface by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_hal.schema import activation, amax, biased, cast, fused, gemm, norm, softmax

if TYPE_CHECKING:
    from te_hal.schema.op import OpSchema

_FAMILIES = (cast, amax, gemm, norm, softmax, activation, fused, biased)

SCHEMAS: dict[str, OpSchema] = {schema.name: schema for family in _FAMILIES for schema in family.SCHEMAS}
