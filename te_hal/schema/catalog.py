"""Every op of the interface by name."""

from __future__ import annotations

from te_hal.schema import activation, amax, cast, gemm, norm, softmax
from te_hal.schema.op import OpSchema

_FAMILIES = (cast, amax, gemm, norm, softmax, activation)

SCHEMAS: dict[str, OpSchema] = {schema.name: schema for family in _FAMILIES for schema in family.SCHEMAS}
