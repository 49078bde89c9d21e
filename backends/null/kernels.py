"""One kernel per op, generated from its schema, signature included."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import ScalingMode, code_format
from te_hal.schema.op import REQUIRED, OpSchema, Output
from te_hal.schema.shapes import dtype_source, shape_source
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.formats import ColumnwiseOrder


def _kernel(schema: OpSchema) -> Callable[..., Any]:
    """A function with the schema's signature. Its text names every parameter, so a call costs no binding."""
    namespace: dict[str, Any] = {
        "torch": torch,
        "empty": torch.empty,
        "empty_storage": QuantizedStorage.empty,
        "kind_of": _kind,
        "TENSOR": ScalingMode.TENSOR,
    }
    exec(compile(kernel_source(schema), f"<null kernel {schema.name}>", "exec"), namespace)  # noqa: S102 - own text
    kernel: Callable[..., Any] = namespace[schema.name]
    for name, _, default in schema.signature:
        if default is not REQUIRED and kernel.__kwdefaults__ and name in kernel.__kwdefaults__:
            kernel.__kwdefaults__[name] = default
    return kernel


def kernel_source(schema: OpSchema) -> str:
    """The Python text of an op's kernel. Keyword defaults stand as None and are set afterwards."""
    parameters = []
    for name, keyword_only, default in schema.signature:
        if keyword_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(name if default is REQUIRED else f"{name}=None")
    lines = [f"def {schema.name}({', '.join(parameters)}):"]
    if any(operand.name == "out" for operand in schema.operands):
        lines += ["    if out is not None:", "        return out"]
    if not schema.outputs:
        lines.append("    return None")
    elif schema.variant is None:
        lines.append(f"    return {_results(schema, None)}")
    else:
        flag = next(flag for flag in schema.flags if flag.name == schema.variant)
        for value in flag.choices:
            lines += [f"    if {flag.name} == {value!r}:", f"        return {_results(schema, value)}"]
    return "\n".join(lines) + "\n"


def _results(schema: OpSchema, variant: object) -> str:
    """The Python text of what the kernel returns."""
    made = [_empty(schema, output, variant, index) for index, output in enumerate(schema.outputs)]
    return made[0] if len(made) == 1 else f"({', '.join(made)})"


def _empty(schema: OpSchema, output: Output, variant: object, index: int) -> str:
    shape, device = shape_source(schema, output.shape, variant), f"{schema.operands[0].name}.device"
    if schema.returns_storage and index == 0:
        mode = "mode" if any(flag.name == "mode" for flag in schema.flags) else "TENSOR"
        kind = f"kind_of(dtype, {mode}, rowwise, columnwise, columnwise_order)"
        nominal = "input" if any(operand.name == "input" for operand in schema.operands) else schema.operands[0].name
        return f"empty_storage({kind}, {shape}, {nominal}.dtype, {device})"
    dtype = dtype_source(schema, output.dtype) if isinstance(output.dtype, str) else repr(output.dtype)
    made = f"empty({shape}, dtype={dtype}, device={device})"
    return made if output.when is None else f"({made} if {output.when} else None)"


@functools.cache
def _kind(
    dtype: torch.dtype, mode: ScalingMode, rowwise: bool, columnwise: bool, order: ColumnwiseOrder
) -> StorageKind:
    return StorageKind.of(code_format(dtype), mode, rowwise=rowwise, columnwise=columnwise, order=order)


KERNELS: dict[str, Callable[..., Any]] = {name: _kernel(schema) for name, schema in SCHEMAS.items()}
